// What a reader would see wrong, found by measuring: texts that lie on each other, and text too pale for WCAG AA.
// test_review_browser.py evaluates one of these functions in the page.

const checks = {
  // Pairs of texts whose letters touch, and by how much the page is wider than the window. Text scrolled out of its box, and
  // the free space above and below letters, do not count.
  overlaps: () => {
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      if (!node.data.trim() || element.closest("script, noscript, style, option, select, .hidden, .skip")) continue;
      if (!element.checkVisibility({visibilityProperty: true, contentVisibilityAuto: true})) continue;
      let clip = {left: -Infinity, top: -Infinity, right: Infinity, bottom: Infinity};
      for (let up = element; up && up !== document.body; up = up.parentElement) {
        if (getComputedStyle(up).overflowX === "visible") continue;
        const r = up.getBoundingClientRect();
        clip = {
          left: Math.max(clip.left, r.left),
          top: Math.max(clip.top, r.top),
          right: Math.min(clip.right, r.right),
          bottom: Math.min(clip.bottom, r.bottom),
        };
      }
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const r of range.getClientRects()) {
        const box = {
          left: Math.max(r.left, clip.left),
          right: Math.min(r.right, clip.right),
          top: Math.max(r.top, clip.top),
          bottom: Math.min(r.bottom, clip.bottom),
        };
        const rim = (r.bottom - r.top) * 0.18; // ascent and descent that letters leave free
        box.top += rim;
        box.bottom -= rim;
        if (box.right - box.left > 1 && box.bottom - box.top > 1)
          found.push({...box, node, text: node.data.trim().slice(0, 50)});
      }
    }
    found.sort((a, b) => a.top - b.top);
    const pairs = [];
    for (let i = 0; i < found.length; i++)
      for (let j = i + 1; j < found.length && found[j].top < found[i].bottom; j++) {
        const [a, b] = [found[i], found[j]];
        if (a.node === b.node) continue;
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - b.top > 1)
          pairs.push(`${a.text} / ${b.text}`);
      }
    return {texts: found.length, pairs, wide: document.documentElement.scrollWidth - innerWidth};
  },

  // Texts whose contrast with what lies beneath them, found by hit testing, is under 4.5 to 1, or 3 to 1 where they are large.
  contrast: () => {
    const parse = (c) => {
      const m = c.match(/[\d.]+/g);
      return m && !c.startsWith("url") ? m.slice(0, 4).map(Number) : null;
    };
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const rgba = (c) => {
      // any CSS colour as 0-255 and alpha
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = c;
      canvas.fillRect(0, 0, 1, 1);
      const d = canvas.getImageData(0, 0, 1, 1).data;
      return [d[0], d[1], d[2], d[3] / 255];
    };
    const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
    const light = (c) => {
      const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const bad = [];
    let checked = 0;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const element = node.parentElement;
      if (
        !node.data.trim() ||
        element.closest("script, noscript, style, option, .hidden, .skip, [aria-hidden=true]:not(svg)")
      )
        continue;
      if (!element.checkVisibility({visibilityProperty: true})) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      const r = range.getClientRects()[0];
      if (!r || r.width < 2) continue;
      const stack = document.elementsFromPoint(r.left + Math.min(r.width / 2, 20), r.top + r.height / 2);
      const at = stack.indexOf(element);
      if (at < 0) continue; // scrolled out of its box
      const style = getComputedStyle(element);
      const svg = element instanceof SVGElement;
      const layers = [];
      for (const below of stack.slice(svg ? at + 1 : at)) {
        const s = getComputedStyle(below);
        const colour =
          below instanceof SVGElement
            ? below.tagName === "svg" || s.fill === "none" || s.fill.startsWith("url")
              ? null
              : s.fill
            : s.backgroundColor;
        if (colour === null) continue;
        const c = rgba(colour);
        if (c[3] > 0) layers.push(c);
        if (c[3] === 1) break;
      }
      let ground = [255, 255, 255, 1];
      for (const layer of layers.reverse()) ground = over(layer, ground);
      const ink = over(rgba(svg ? style.fill : style.color), ground);
      const [a, b] = [light(ink.slice(0, 3)), light(ground.slice(0, 3))].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      checked++;
      if (ratio < (large ? 3 : 4.5)) bad.push(`${ratio.toFixed(2)} ${node.data.trim().slice(0, 40)}`);
    }
    return {checked, bad};
  },
};
