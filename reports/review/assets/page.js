// Puts the page together, draws it, and keeps it right when theme, width or medium change.
"use strict";

(function () {
  const root = document.documentElement;
  const main = document.getElementById("main");

  // -- theme: the system's, or the reader's choice --
  const system = matchMedia("(prefers-color-scheme: dark)");
  const order = ["auto", "light", "dark"];
  const theme = R.h("button", {type: "button", class: "theme"});
  function setTheme(choice) {
    root.dataset.theme = choice;
    root.dataset.scheme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
    theme.textContent = `Theme: ${choice}`;
  }
  theme.addEventListener("click", () => {
    setTheme(order[(order.indexOf(root.dataset.theme) + 1) % order.length]);
    R.drawAll(true);
  });
  system.addEventListener("change", () => {
    setTheme(root.dataset.theme);
    R.drawAll(true);
  });
  setTheme("auto");

  // -- sections: one that fails says so and leaves the others --
  function failed(error) {
    console.error(error);
    return R.h("p", {class: "empty"}, `This part could not be drawn: ${R.short(error, 200)}`);
  }
  const makers = R.makers || [
    R.verdict,
    R.findings,
    R.timeSplit,
    R.pipeline,
    R.ledger,
    R.ranks,
    R.skew,
    R.experts,
    R.bandwidth,
    R.memory,
    R.issues,
    R.history,
    R.appendix,
  ];
  const parts = makers.map((make) => {
    try {
      return make();
    } catch (error) {
      return R.h("section", {}, failed(error));
    }
  });
  document.getElementById("rail").append(
    R.h("p", {class: "brand"}, R.brand || "traceanalyzer review"),
    R.h(
      "ul",
      {},
      R.sections.map((s) => R.h("li", {}, R.h("a", {href: `#${s.id}`}, s.title.split(":")[0]))),
    ),
    theme,
  );
  main.append(...parts);
  for (const part of parts) {
    try {
      if (part.fill) part.fill();
    } catch (error) {
      part.append(failed(error));
    }
  }
  R.drawAll();

  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    requestAnimationFrame(() => R.drawAll());
  }).observe(main);

  // -- paper: light, as wide as the paper, and the ledger whole --
  let before = "auto";
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    setTheme("light");
    root.classList.add("paper");
    if (R.ledgerTable) R.ledgerTable.all();
    R.drawAll(true);
  });
  addEventListener("afterprint", () => {
    setTheme(before);
    root.classList.remove("paper");
    R.drawAll(true);
  });

  root.dataset.ready = "true";
})();
