// Charts: options for Apache ECharts. An axis or class has one colour wherever it appears, and always a pattern or a text
// beside it. Drawn as SVG, without animation; drawn again when the theme or the width changes.
"use strict";

R.charts = [];

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif";

/** A box in which option(width, theme) is drawn. label: what it shows, in words, for those who do not see it. */
R.chart = function (option, height, label) {
  const box = R.h("div", {class: "chart", role: "img", "aria-label": label});
  const entry = {box, option, height, chart: null, width: 0};
  entry.draw = function () {
    const width = box.clientWidth;
    if (!width) return;
    const tall = typeof entry.height === "function" ? entry.height(width) : entry.height;
    box.style.setProperty("height", `${tall}px`);
    if (!entry.chart) entry.chart = echarts.init(box, null, {renderer: "svg", width, height: tall});
    else entry.chart.resize({width, height: tall});
    entry.width = width;
    entry.chart.setOption({...common(), ...entry.option(width)}, {notMerge: true});
    // The label above says it in our words; what ECharts' own elements say twice is left out.
    box.querySelectorAll("svg").forEach((svg) => svg.setAttribute("aria-hidden", "true"));
  };
  box.redraw = entry.draw;
  box.chartEntry = entry;
  R.charts.push(entry);
  return box;
};

/** Draws what is on the page and not yet drawn at its width; everything, where the theme changed. */
R.drawAll = function (changed) {
  R.charts = R.charts.filter((entry) => {
    const gone = entry.chart && !entry.box.isConnected;
    if (gone) entry.chart.dispose();
    return !gone;
  });
  for (const entry of R.charts) {
    if (entry.box.isConnected && (changed || entry.box.clientWidth !== entry.width)) entry.draw();
  }
};

function common() {
  return {
    animation: false,
    textStyle: {fontFamily: FONT, fontSize: 12, color: R.css("ink")},
    aria: {enabled: false},
    tooltip: {
      confine: true,
      transitionDuration: 0,
      backgroundColor: R.css("card"),
      borderColor: R.css("line"),
      borderWidth: 1,
      padding: [8, 10],
      textStyle: {color: R.css("ink"), fontSize: 12, fontFamily: FONT},
      extraCssText: "max-width:340px;white-space:normal;overflow-wrap:anywhere",
    },
  };
}

/** Text of a tooltip as an element: a head and rows of name and value. */
function tip(head, rows, note) {
  return R.h(
    "div",
    {class: "tip"},
    R.h("strong", {}, R.short(head, 90)),
    R.h(
      "dl",
      {},
      rows
        .filter((row) => row && row[1] !== null)
        .map(([name, value]) => [R.h("dt", {}, R.short(name, 40)), R.h("dd", {}, R.short(value, 90))]),
    ),
    note ? R.h("p", {}, R.short(note, 300)) : null,
  );
}

const axisText = () => ({color: R.css("muted"), fontSize: 11, hideOverlap: true});
const quietLine = () => ({lineStyle: {color: R.css("line")}});

function valueAxis(format, more = {}) {
  return {
    type: "value",
    axisLabel: {...axisText(), formatter: format},
    splitLine: quietLine(),
    axisLine: {show: false},
    axisTick: {show: false},
    nameTextStyle: {color: R.css("muted"), fontSize: 11},
    ...more,
  };
}

function categoryAxis(names, more = {}) {
  return {
    type: "category",
    data: names,
    axisLine: {show: false},
    axisTick: {show: false},
    splitLine: {show: false},
    axisLabel: {color: R.css("ink"), fontSize: 11, ...(more.axisLabel || {})},
    ...Object.fromEntries(Object.entries(more).filter(([k]) => k !== "axisLabel")),
  };
}

// -- colours ----------------------------------------------------------------------------------------------------------

function channels(colour) {
  const hex = colour.replace("#", "");
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function luminance(colour) {
  const [r, g, b] = channels(colour).map((c) =>
    c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Black or white, whichever reads better on a colour: at least 4.5 to 1. */
function inkOn(colour) {
  const l = luminance(colour);
  return 1.05 / (l + 0.05) >= (l + 0.05) / 0.05 ? "#ffffff" : "#000000";
}

function mixed(a, b, share) {
  const [x, y] = [channels(a), channels(b)];
  return `#${x
    .map((c, i) =>
      Math.round(c + (y[i] - c) * share)
        .toString(16)
        .padStart(2, "0"),
    )
    .join("")}`;
}

/** Colour of a share between 0 and 1 on the theme's ramp. */
R.ramp = function (share, name = "ramp") {
  const stops = [1, 2, 3, 4, 5].map((i) => R.css(`${name}-${i}`));
  const at = Math.min(1, Math.max(0, share)) * 4;
  const low = Math.min(3, Math.floor(at));
  return mixed(stops[low], stops[low + 1], at - low);
};

// -- the classes of time ----------------------------------------------------------------------------------------------

const ORDER = ["compute", "copy", "communication", "shared", "pp", "bubble", "launch_starved", "idle"];
const WORDS = {
  compute: "compute",
  copy: "copy",
  communication: "exposed",
  shared: "exposed, several roles",
  pp: "PP, exposed",
  bubble: "bubble",
  launch_starved: "launch-starved",
  idle: "idle",
};

/** What a class of time is called, coloured and patterned by: {key, title, colour, pattern, order}. */
R.timeClass = function (entry) {
  const word = String(entry.class);
  const role = R.known(entry.role) ? entry.role : null;
  const axis = role === null ? (word === "pp" ? "PP" : null) : R.axisOf(role);
  let title = WORDS[word] || R.short(word.replace(/_/g, " "), 40);
  if (role !== null)
    title = `${R.roleName(role)} ${entry.part || (word === "communication" || word === "pp" ? "exposed, not split" : title)}`;
  else if (entry.part) title += `, ${entry.part}`;
  const colour =
    axis !== null
      ? axis.toLowerCase()
      : ["compute", "copy", "bubble", "launch_starved", "idle"].includes(word)
        ? word.replace("_", "-")
        : "other";
  const pattern =
    entry.part === "waiting"
      ? "waiting"
      : axis !== null && entry.part !== "transfer"
        ? "unsplit"
        : {bubble: "bubble", idle: "idle", launch_starved: "starved"}[word] || "solid";
  const at = ORDER.indexOf(word) < 0 ? 2.5 : ORDER.indexOf(word);
  const axisAt = axis === null ? 0 : [...R.axes, "other", "unknown"].indexOf(axis);
  return {
    key: [word, role, entry.part || ""].join("|"),
    title,
    colour,
    pattern,
    order: [at, axisAt, role || "", entry.part === "transfer" ? 0 : entry.part === "waiting" ? 1 : 2],
    waste: word !== "compute",
  };
};

R.byOrder = function (a, b) {
  for (let i = 0; i < a.order.length; i++) if (a.order[i] !== b.order[i]) return a.order[i] < b.order[i] ? -1 : 1;
  return 0;
};

const classColour = (c) => R.css(`c-${c.colour}`);

function decal(pattern) {
  const colour = R.css("decal");
  const stripes = {symbol: "rect", color: colour, dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: -Math.PI / 4};
  return {
    solid: {symbol: "none"},
    waiting: stripes,
    unsplit: {
      symbol: "circle",
      color: colour,
      dashArrayX: [
        [5, 5],
        [0, 5, 5, 0],
      ],
      dashArrayY: [5, 0],
      symbolSize: 0.55,
    },
    bubble: {...stripes, rotation: Math.PI / 4, dashArrayY: [1, 6]},
    idle: {symbol: "rect", color: R.css("decal-quiet"), dashArrayX: [1, 0], dashArrayY: [1, 5], rotation: Math.PI / 2},
    starved: {symbol: "rect", color: colour, dashArrayX: [1, 0], dashArrayY: [3, 3], rotation: 0},
  }[pattern];
}

/**
 * Stacked bars of time. bars: [{name, ranks, total_ns, parts: Map(key -> ns), ...}], classes in order.
 * One bar is as long as its devices' mean step, so that bars of stages with different numbers of ranks compare.
 */
R.timeChart = function (bars, classes, label) {
  const tall = (width) => bars.length * (width < 500 ? 30 : 34) + 34;
  return R.chart(
    (width) => {
      const room = width - (width < 500 ? 74 : 104);
      const longest = Math.max(...bars.map((b) => b.total_ns / b.devices), 1);
      return {
        grid: {left: width < 500 ? 62 : 84, right: 12, top: 2, bottom: 28},
        xAxis: valueAxis((v) => R.time(v), {
          min: 0,
          max: longest,
          splitNumber: width < 500 ? 3 : 6,
          axisLabel: {...axisText(), formatter: (v) => R.time(Math.round(v)), showMaxLabel: false},
        }),
        yAxis: categoryAxis(
          bars.map((b) => b.name),
          {inverse: true, axisLabel: {width: width < 500 ? 54 : 74, overflow: "truncate"}},
        ),
        tooltip: {
          ...common().tooltip,
          trigger: "item",
          formatter: (p) => {
            const bar = bars[p.dataIndex];
            const c = classes[p.seriesIndex];
            const ns = bar.parts.get(c.key) || 0;
            return tip(`${bar.name}: ${c.title}`, [
              ["of the step", R.percent(ns / bar.total_ns)],
              ["per device", R.time(Math.round(ns / bar.devices))],
              [`sum over ${R.plural(bar.devices, "device")}`, `${R.count(ns)} ns`],
            ]);
          },
        },
        series: classes.map((c) => {
          const colour = classColour(c);
          return {
            type: "bar",
            stack: "step",
            name: c.title,
            barWidth: width < 500 ? 20 : 24,
            data: bars.map((b) => {
              const value = (b.parts.get(c.key) || 0) / b.devices;
              return {value, label: {show: (value / longest) * room >= 46}};
            }),
            itemStyle: {color: colour, decal: decal(c.pattern), borderColor: R.css("card"), borderWidth: 1},
            emphasis: {disabled: true},
            label: {
              fontSize: 11,
              color: inkOn(colour),
              backgroundColor: colour,
              padding: [1, 3],
              formatter: (p) => R.percent((bars[p.dataIndex].parts.get(c.key) || 0) / bars[p.dataIndex].total_ns),
            },
          };
        }),
      };
    },
    tall,
    label,
  );
};

// -- the pipeline -----------------------------------------------------------------------------------------------------

const BOX = {forward: "forward", backward: "backward", recompute: "recompute"};

/** Stages down, time across, a box per pass of a micro-batch. Gives {element, zoom(factor), move(share), whole()}. */
R.pipelineChart = function (pipeline, label) {
  const stages = [
    ...new Set([...pipeline.boxes.map((b) => b.stage), ...(pipeline.stages || []).map((s) => s.stage)]),
  ].sort((a, b) => a - b);
  const bubble = new Map(
    (pipeline.stages || []).map((s) => [
      s.stage,
      R.known(s.bubble_of_total) ? s.bubble_of_total : s.window_ns ? Number(s.bubble_ns) / Number(s.window_ns) : null,
    ]),
  );
  const end = Math.max(
    Number(pipeline.window_ns || 0),
    ...pipeline.boxes.map((b) => Number(b.start_ns) + Number(b.dur_ns)),
    1,
  );
  const chunks = new Set(pipeline.boxes.map((b) => b.chunk || 0)).size;
  const row = stages.length > 16 ? 20 : 32;
  let range = [0, 100];
  const box = R.chart(
    (width) => {
      const narrow = width < 500;
      const left = narrow ? 54 : 106;
      return {
        grid: {left, right: 14, top: 4, bottom: 66},
        xAxis: valueAxis(null, {
          min: 0,
          max: end,
          splitNumber: narrow ? 3 : 8,
          axisLabel: {...axisText(), formatter: (v) => R.time(Math.round(v)), showMaxLabel: false},
        }),
        yAxis: categoryAxis(stages, {
          inverse: true,
          axisLabel: {
            interval: 0,
            lineHeight: 13,
            formatter: (s) => {
              const share = bubble.get(Number(s));
              const text = R.known(share) ? R.percent(share) : "";
              return narrow ? `${s}: ${text}` : `stage ${s}  ${text}`;
            },
          },
        }),
        dataZoom: [
          {
            type: "inside",
            zoomOnMouseWheel: "ctrl",
            moveOnMouseMove: true,
            moveOnMouseWheel: false,
            preventDefaultMouseMove: false,
            filterMode: "weakFilter",
            start: range[0],
            end: range[1],
          },
          {
            type: "slider",
            height: 18,
            bottom: 8,
            showDetail: false,
            brushSelect: false,
            filterMode: "weakFilter",
            start: range[0],
            end: range[1],
            borderColor: R.css("line"),
            fillerColor: R.css("filler"),
            backgroundColor: "transparent",
            showDataShadow: false,
            handleStyle: {color: R.css("card"), borderColor: R.css("muted")},
            moveHandleStyle: {color: R.css("muted")},
          },
        ],
        tooltip: {
          ...common().tooltip,
          formatter: (p) => {
            if (p.seriesIndex === 0)
              return tip(`Stage ${stages[p.data[0]]}`, [
                ["bubble of the window", R.percent(bubble.get(stages[p.data[0]]))],
              ]);
            const b = pipeline.boxes[p.dataIndex];
            return tip(`${b.kind}, micro-batch ${R.known(b.microbatch) ? b.microbatch : "unknown"}`, [
              ["stage", `${b.stage}${chunks > 1 ? `, chunk ${b.chunk}` : ""}`],
              ["rank", String(b.rank)],
              ["from", R.time(b.start_ns)],
              ["takes", `${R.time(b.dur_ns)} (${R.count(b.dur_ns)} ns)`],
              ["known by", R.known(b.evidence) ? b.evidence : null],
            ]);
          },
        },
        series: [
          {
            type: "custom",
            silent: false,
            data: stages.map((s, i) => [i, 0, end]),
            encode: {x: [1, 2], y: 0},
            renderItem: (params, api) => {
              const size = api.size([0, 1])[1] * 0.82;
              const y = api.coord([0, api.value(0)])[1] - size / 2;
              return {
                type: "rect",
                shape: {x: params.coordSys.x, y, width: params.coordSys.width, height: size},
                style: {fill: R.css("track"), stroke: R.css("line"), lineWidth: 1},
              };
            },
          },
          {
            type: "custom",
            data: pipeline.boxes.map((b) => [
              stages.indexOf(b.stage),
              Number(b.start_ns),
              Number(b.start_ns) + Number(b.dur_ns),
            ]),
            encode: {x: [1, 2], y: 0},
            renderItem: (params, api) => {
              const b = pipeline.boxes[params.dataIndex];
              const from = api.coord([api.value(1), api.value(0)]);
              const to = api.coord([api.value(2), api.value(0)]);
              const size = api.size([0, 1])[1] * 0.82;
              const shape = echarts.graphic.clipRectByRect(
                {x: from[0], y: from[1] - size / 2, width: Math.max(to[0] - from[0], 0.5), height: size},
                params.coordSys,
              );
              if (!shape) return null;
              const fill = R.css(`p-${BOX[b.kind] || "other"}${(b.chunk || 0) % 2 ? "-odd" : ""}`);
              const text = R.known(b.microbatch) ? String(b.microbatch) : "?";
              const children = [
                {
                  type: "rect",
                  shape,
                  style: {fill, stroke: R.css("card"), lineWidth: shape.width > 4 ? 1 : 0, lineDash: null},
                },
              ];
              if (b.kind === "recompute" && shape.width > 6)
                children.push({
                  type: "line",
                  silent: true,
                  shape: {
                    x1: shape.x + 1,
                    y1: shape.y + shape.height - 3,
                    x2: shape.x + shape.width - 1,
                    y2: shape.y + shape.height - 3,
                  },
                  style: {stroke: inkOn(fill), lineWidth: 1.5, lineDash: [3, 2]},
                });
              const size12 = row > 24 && shape.width >= text.length * 7.6 + 3;
              if ((size12 || shape.width >= text.length * 6.2 + 2) && shape.height >= 12) {
                children.push({
                  type: "text",
                  silent: true,
                  x: shape.x + shape.width / 2,
                  y: shape.y + shape.height / 2,
                  style: {
                    text,
                    fill: inkOn(fill),
                    font: `${size12 ? 12 : 10}px ${FONT}`,
                    align: "center",
                    verticalAlign: "middle",
                  },
                });
              }
              return {type: "group", children};
            },
          },
        ],
      };
    },
    () => stages.length * row + 74,
    label,
  );
  const apply = () =>
    box.chartEntry.chart && box.chartEntry.chart.dispatchAction({type: "dataZoom", start: range[0], end: range[1]});
  const clamp = (from, to) => {
    const size = Math.min(100, Math.max(0.5, to - from));
    const start = Math.min(100 - size, Math.max(0, from));
    range = [start, start + size];
    apply();
  };
  const current = () => {
    const zoom = box.chartEntry.chart && box.chartEntry.chart.getOption().dataZoom[0];
    if (zoom) range = [zoom.start, zoom.end];
    return range;
  };
  return {
    element: box,
    zoom(factor) {
      const [a, b] = current();
      const middle = (a + b) / 2;
      const half = ((b - a) * factor) / 2;
      clamp(middle - half, middle + half);
    },
    move(share) {
      const [a, b] = current();
      clamp(a + (b - a) * share, b + (b - a) * share);
    },
    whole() {
      clamp(0, 100);
    },
    range: current,
  };
};

// -- grids of cells ---------------------------------------------------------------------------------------------------

/**
 * A grid coloured by value. cells: [{x, y, value, shown, colour, tip: [head, rows]}], x and y indices into names.
 * A value that is not known is an empty cell with a question mark.
 */
R.gridChart = function (columns, rows, cells, label, titles = {}) {
  const tallest = rows.length > 40 ? 14 : rows.length > 16 ? 20 : 30;
  const widest = columns.length <= 16 ? columns.length * 130 : 0;
  const leftOf = (width) => Math.min(width < 500 ? 90 : 170, 14 + 6.4 * Math.max(...rows.map((r) => r.length), 2));
  return R.chart(
    (width) => ({
      grid: {
        left: leftOf(width),
        right: widest ? Math.max(8, width - leftOf(width) - widest) : 8,
        top: 4,
        bottom: titles.x ? 40 : 24,
      },
      xAxis: categoryAxis(columns, {
        axisLabel: {...axisText(), interval: "auto"},
        name: titles.x,
        nameLocation: "middle",
        nameGap: 24,
        nameTextStyle: {color: R.css("muted"), fontSize: 11},
      }),
      yAxis: categoryAxis(rows, {
        inverse: true,
        axisLabel: {...axisText(), interval: "auto", width: leftOf(width) - 10, overflow: "truncate"},
      }),
      tooltip: {...common().tooltip, formatter: (p) => tip(...cells[p.dataIndex].tip)},
      series: [
        {
          type: "custom",
          data: cells.map((c) => [c.x, c.y]),
          encode: {x: 0, y: 1},
          renderItem: (params, api) => {
            const c = cells[params.dataIndex];
            const [x, y] = api.coord([api.value(0), api.value(1)]);
            const [w, h] = api.size([1, 1]);
            const gap = w > 8 && h > 8 ? 1 : 0.25;
            const fill = R.known(c.value) ? c.colour() : R.css("track");
            const shape = {
              x: x - w / 2 + gap,
              y: y - h / 2 + gap,
              width: Math.max(w - 2 * gap, 0.5),
              height: Math.max(h - 2 * gap, 0.5),
            };
            const children = [
              {type: "rect", shape, style: {fill, stroke: R.known(c.value) ? "none" : R.css("line"), lineWidth: 1}},
            ];
            const text = R.known(c.value) ? c.shown : "?";
            if (text.length * 6.4 + 6 <= w && h >= 15) {
              children.push({
                type: "text",
                silent: true,
                x,
                y,
                style: {
                  text,
                  fill: R.known(c.value) ? inkOn(fill) : R.css("muted"),
                  font: `11px ${FONT}`,
                  align: "center",
                  verticalAlign: "middle",
                },
              });
            }
            return {type: "group", children};
          },
        },
      ],
    }),
    () => rows.length * tallest + (titles.x ? 46 : 30),
    label,
  );
};

// -- skew -------------------------------------------------------------------------------------------------------------

/** Own and inherited lateness of ranks, a call's mean, with what the clocks leave open in a call as an error bar. */
R.skewChart = function (rows, label) {
  const own = (r) => (R.known(r.own_late_ns) ? Number(r.own_late_ns) / (r.calls || 1) : 0);
  const inherited = (r) => (R.known(r.inherited_late_ns) ? Number(r.inherited_late_ns) / (r.calls || 1) : 0);
  const most = Math.max(
    ...rows.map((r) => Math.max(own(r) + Math.max(inherited(r), 0), own(r) + Number(r.residual_ns || 0))),
  );
  return R.chart(
    (width) => ({
      grid: {left: width < 500 ? 74 : 94, right: 28, top: 2, bottom: 28},
      xAxis: valueAxis(null, {
        min: (v) => Math.min(0, v.min),
        max: most > 0 ? most * 1.02 : null,
        splitNumber: width < 500 ? 3 : 6,
        axisLabel: {...axisText(), formatter: (v) => R.time(Math.round(v)), showMaxLabel: false},
      }),
      yAxis: categoryAxis(
        rows.map((r) => `rank ${r.rank}${r.slow ? " ●" : ""}`),
        {inverse: true, axisLabel: {interval: 0}},
      ),
      tooltip: {
        ...common().tooltip,
        formatter: (p) => {
          const r = rows[p.dataIndex];
          return tip(
            `Rank ${r.rank}, ${R.roleName(r.role)}`,
            [
              ["own lateness of a call, mean", R.known(r.own_late_ns) ? R.time(Math.round(own(r))) : "unknown"],
              ["clocks leave open in a call", R.known(r.residual_ns) ? `± ${R.time(r.residual_ns)}` : "unknown"],
              [
                "inherited of a call, mean",
                R.known(r.inherited_late_ns) ? R.time(Math.round(inherited(r))) : "unknown",
              ],
              ["own, sum", R.time(r.own_late_ns)],
              ["calls", R.known(r.calls) ? R.count(r.calls) : null],
            ],
            r.finding,
          );
        },
      },
      series: [
        {
          type: "bar",
          stack: "late",
          barWidth: 14,
          data: rows.map(own),
          itemStyle: {color: R.css("c-launch-starved")},
          emphasis: {disabled: true},
        },
        {
          type: "bar",
          stack: "late",
          barWidth: 14,
          data: rows.map(inherited),
          itemStyle: {color: R.css("c-idle-strong"), decal: decal("waiting")},
          emphasis: {disabled: true},
        },
        {
          type: "custom",
          silent: true,
          z: 5,
          data: rows.map((r, i) => [
            i,
            own(r),
            R.known(r.residual_ns) && R.known(r.own_late_ns) ? Number(r.residual_ns) : -1,
          ]),
          encode: {x: 1, y: 0},
          renderItem: (params, api) => {
            const open = api.value(2);
            if (open < 0) return null;
            const [from, to] = [params.coordSys.x, params.coordSys.x + params.coordSys.width];
            const inside = (x) => Math.min(to, Math.max(from, x));
            const [low, y] = api.coord([api.value(1) - open, api.value(0)]);
            const [high] = api.coord([api.value(1) + open, api.value(0)]);
            const style = {stroke: R.css("ink"), lineWidth: 1.5, fill: "none"};
            const line = (x1, y1, x2, y2) => ({type: "line", shape: {x1, y1, x2, y2}, style});
            const ends = [low, high].filter((x) => inside(x) === x).map((x) => line(x, y - 4, x, y + 4));
            return {type: "group", children: [line(inside(low), y, inside(high), y), ...ends]};
          },
        },
      ],
    }),
    () => rows.length * 22 + 32,
    label,
  );
};

// -- bandwidth --------------------------------------------------------------------------------------------------------

const SYMBOLS = {
  TP: "circle",
  CP: "triangle",
  EP: "diamond",
  PP: "rect",
  DP: "path://M0,0L12,0L6,11Z",
  other: "path://M4,0h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
  unknown: "path://M0,5h12v2h-12z",
};
R.symbols = {TP: "●", CP: "▲", EP: "◆", PP: "■", DP: "▼", other: "✚", unknown: "▬"};

/** Bus bandwidth against payload: a point per role, operation and size, a line from the slowest call to the fastest. */
R.bandwidthChart = function (rows, label) {
  const scale = (row, ns) =>
    R.known(ns) && Number(ns) > 0
      ? (Number(row.bus_gb_per_s) * Number(row.median_transfer_ns)) / Number(ns)
      : Number(row.bus_gb_per_s);
  const axesHere = [...R.axes, "other", "unknown"].filter((a) => rows.some((r) => R.axisOf(r.role) === a));
  const links = rows.filter((r) => R.known(r.link_bus_gb_per_s));
  const exponents = rows.map((r) => Math.log(Number(r.payload_bytes)) / Math.log(4));
  const [first, last] = [Math.floor(Math.min(...exponents) - 0.1), Math.ceil(Math.max(...exponents) + 0.1)];
  const middle = (first + last) / 2;
  const highest = Math.max(
    ...rows.map((r) => Math.max(Number(r.bus_gb_per_s), R.known(r.link_bus_gb_per_s) ? r.link_bus_gb_per_s : 0)),
    1e-9,
  );
  const at = (r, width) => [
    ((Math.log(Number(r.payload_bytes)) / Math.log(4) - first) / (last - first)) * (width - 72),
    (Number(r.bus_gb_per_s) / highest) * 220,
  ];
  /** Whether the words beside a point touch no other point and none of its words. */
  const free = (r, width) =>
    rows.every((other) => {
      if (other === r) return true;
      const [a, b] = [at(r, width), at(other, width)];
      return Math.abs(a[1] - b[1]) > 16 || Math.abs(a[0] - b[0]) > 260;
    });
  return R.chart(
    (width) => ({
      grid: {left: 52, right: 20, top: 26, bottom: 44},
      xAxis: {
        type: "log",
        logBase: 4,
        name: "payload of one call",
        nameLocation: "middle",
        nameGap: 28,
        nameTextStyle: {color: R.css("muted"), fontSize: 11},
        min: 4 ** first,
        max: 4 ** last,
        axisLabel: {
          ...axisText(),
          showMinLabel: width >= 500,
          showMaxLabel: width >= 500,
          formatter: (v) => (v >= 1 ? R.bytes(Math.round(v)) : ""),
        },
        axisLine: {lineStyle: {color: R.css("line")}},
        splitLine: {show: false},
      },
      yAxis: valueAxis((v) => R.digits(v), {
        min: 0,
        name: "bus bandwidth, GB/s",
        nameTextStyle: {color: R.css("muted"), fontSize: 11, align: "left", padding: [0, 0, 0, -40]},
      }),
      tooltip: {
        ...common().tooltip,
        formatter: (p) => {
          const r = p.data && rows[p.data.at];
          if (!r) return "";
          return tip(`${R.roleName(r.role)} ${r.op}, ${R.bytes(r.payload_bytes)}`, [
            ["bus bandwidth", `${R.number(r.bus_gb_per_s)} GB/s`],
            ["link", R.known(r.link_bus_gb_per_s) ? `${R.number(r.link_bus_gb_per_s)} GB/s` : null],
            ["median transfer", R.time(r.median_transfer_ns)],
            ["fastest, slowest", `${R.time(r.min_transfer_ns)}, ${R.time(r.max_transfer_ns)}`],
            ["ranks", R.known(r.group_size) ? `${r.group_size}, ${r.span || "span unknown"}` : null],
            ["type", r.dtype || null],
            ["calls", R.count(r.calls)],
          ]);
        },
      },
      series: [
        ...axesHere.map((axis) => {
          const colour = R.css(`c-${axis.toLowerCase()}`);
          return {
            type: "scatter",
            name: axis,
            symbol: SYMBOLS[axis],
            symbolSize: 11,
            emphasis: {disabled: true},
            label: {
              show: width >= 500,
              distance: 7,
              offset: [0, -7],
              fontSize: 11,
              color: R.css("muted"),
              formatter: (p) =>
                free(rows[p.data.at], width)
                  ? `${R.roleName(rows[p.data.at].role)} ${R.short(rows[p.data.at].op, 16)}`
                  : "",
            },
            data: rows
              .filter((r) => R.axisOf(r.role) === axis)
              .map((r) => ({
                label: {position: Math.log(Number(r.payload_bytes)) / Math.log(4) > middle ? "left" : "right"},
                value: [Number(r.payload_bytes), r.bus_gb_per_s],
                at: rows.indexOf(r),
                itemStyle:
                  r.span === "inter"
                    ? {color: R.css("card"), borderColor: colour, borderWidth: 2, opacity: 1}
                    : {color: colour, borderColor: R.css("card"), borderWidth: 1, opacity: 1},
              })),
          };
        }),
        {
          type: "custom",
          silent: true,
          z: 1,
          data: rows.map((r) => [Number(r.payload_bytes), scale(r, r.max_transfer_ns), scale(r, r.min_transfer_ns)]),
          encode: {x: 0, y: [1, 2]},
          renderItem: (params, api) => {
            const low = api.coord([api.value(0), api.value(1)]);
            const high = api.coord([api.value(0), api.value(2)]);
            return {
              type: "line",
              shape: {x1: low[0], y1: low[1], x2: high[0], y2: high[1]},
              style: {stroke: R.css("muted"), lineWidth: 1.25},
            };
          },
        },
        {
          type: "custom",
          silent: true,
          z: 1,
          data: links.map((r) => [Number(r.payload_bytes), r.link_bus_gb_per_s]),
          encode: {x: 0, y: 1},
          renderItem: (params, api) => {
            const [x, y] = api.coord([api.value(0), api.value(1)]);
            return {
              type: "line",
              shape: {x1: x - 12, y1: y, x2: x + 12, y2: y},
              style: {stroke: R.css("ink"), lineWidth: 2},
            };
          },
        },
      ],
    }),
    (width) => (width < 500 ? 260 : 320),
    label,
  );
};

// -- memory -----------------------------------------------------------------------------------------------------------

const MEMORY = ["parameters", "gradients", "optimizer", "activations", "peak"];

/** Expected and measured memory: two bars per place. places: [{name, expected: Map(what -> bytes), measured: Map}]. */
R.memoryChart = function (places, label) {
  const parts = (map) =>
    ["parameters", "gradients", "optimizer", "activations"].some((w) => R.known(map.get(w)))
      ? MEMORY.slice(0, 4)
      : ["peak"];
  const others = [...new Set(places.flatMap((p) => [...p.expected.keys(), ...p.measured.keys()]))].filter(
    (w) => !MEMORY.includes(w),
  );
  const whats = [...MEMORY, ...others];
  const value = (map, what) =>
    (parts(map).includes(what) || others.includes(what)) && Number(map.get(what)) ? Number(map.get(what)) : null;
  const most = Math.max(
    1,
    ...places.flatMap((p) =>
      [p.expected, p.measured].flatMap((map) => [R.sum(whats.map((w) => value(map, w))), Number(map.get("peak") || 0)]),
    ),
  );
  const peaks = places.flatMap((p, i) =>
    [
      ["expected", -1],
      ["measured", 1],
    ]
      .filter(([side]) => R.known(p[side].get("peak")) && !parts(p[side]).includes("peak"))
      .map(([side, at]) => [Number(p[side].get("peak")), i, at]),
  );
  return R.chart(
    (width) => ({
      grid: {left: width < 500 ? 64 : 84, right: 24, top: 2, bottom: 28},
      xAxis: valueAxis((v) => R.bytes(v), {
        min: 0,
        max: most * 1.02,
        interval: 2 ** Math.ceil(Math.log2(most / (width < 500 ? 3 : 8))),
        axisLabel: {...axisText(), formatter: (v) => R.bytes(v), showMaxLabel: false},
      }),
      yAxis: categoryAxis(
        places.map((p) => p.name),
        {inverse: true},
      ),
      tooltip: {
        ...common().tooltip,
        formatter: (p) => {
          const place = places[p.dataIndex];
          const [side, what] = p.seriesId.split("|");
          if (!place || !what) return "";
          return tip(
            `${place.name}: ${what}`,
            [
              ["expected", R.bytes(place.expected.get(what))],
              ["measured", R.bytes(place.measured.get(what))],
            ],
            `The bar is the ${side} one.`,
          );
        },
      },
      series: ["expected", "measured"]
        .flatMap((side) =>
          whats.map((what, i) => {
            const colour = R.css(`m-${Math.min(i + 1, 5)}`);
            return {
              id: `${side}|${what}`,
              type: "bar",
              stack: side,
              barWidth: 13,
              barGap: "25%",
              emphasis: {disabled: true},
              data: places.map((p) => value(p[side], what)),
              itemStyle: {
                color: side === "expected" ? R.css("card") : colour,
                borderColor: colour,
                borderWidth: side === "expected" ? 1.5 : 0,
                decal:
                  side === "expected"
                    ? {symbol: "rect", color: colour, dashArrayX: [1, 0], dashArrayY: [2, 3], rotation: -Math.PI / 4}
                    : {symbol: "none"},
              },
            };
          }),
        )
        .concat({
          type: "custom",
          silent: true,
          z: 5,
          data: peaks,
          encode: {x: 0, y: 1},
          renderItem: (params, api) => {
            const [x, y] = api.coord([api.value(0), api.value(1)]);
            const middle = y + api.value(2) * 8;
            return {
              type: "line",
              shape: {x1: x, y1: middle - 8, x2: x, y2: middle + 8},
              style: {stroke: R.css("ink"), lineWidth: 2.5},
            };
          },
        }),
    }),
    () => places.length * 42 + 32,
    label,
  );
};

// -- history ----------------------------------------------------------------------------------------------------------

R.historyChart = function (rows, label) {
  const timed = rows.filter((r) => R.known(r.step_ns));
  return R.chart(
    (width) => ({
      grid: {left: 58, right: 20, top: 26, bottom: 40},
      xAxis: valueAxis((v) => R.count(v), {
        min: "dataMin",
        max: "dataMax",
        minInterval: 1,
        name: "iteration",
        nameLocation: "middle",
        nameGap: 24,
        splitLine: {show: false},
        axisLabel: {...axisText(), formatter: (v) => R.count(Math.round(v))},
      }),
      yAxis: valueAxis((v) => R.time(Math.round(v)), {
        scale: true,
        name: "step time",
        nameTextStyle: {color: R.css("muted"), fontSize: 11, align: "left", padding: [0, 0, 0, -46]},
      }),
      tooltip: {
        ...common().tooltip,
        formatter: (p) => {
          const r = timed[p.data.at];
          return tip(
            `Iteration ${r.iteration}${r.profiled ? ", profiled" : ""}`,
            Object.entries(r)
              .filter(([k]) => !["iteration", "profiled"].includes(k))
              .map(([k, v]) => [
                k.replace(/_ns$/, "").replace(/_/g, " "),
                R.known(v) ? R.inUnit(v, R.unitOf(k)) : "unknown",
              ]),
          );
        },
      },
      series: [
        {
          type: "line",
          symbol: timed.length > 80 ? "none" : "circle",
          symbolSize: 4,
          lineStyle: {width: 1.5, color: R.css("c-compute")},
          itemStyle: {color: R.css("c-compute")},
          emphasis: {disabled: true},
          data: timed.map((r, at) => ({value: [r.iteration, Number(r.step_ns)], at})),
        },
        {
          type: "scatter",
          symbol: "diamond",
          symbolSize: 12,
          itemStyle: {color: R.css("c-dp"), borderColor: R.css("card"), borderWidth: 1},
          emphasis: {disabled: true},
          data: timed.flatMap((r, at) => (r.profiled ? [{value: [r.iteration, Number(r.step_ns)], at}] : [])),
        },
      ],
    }),
    220,
    label,
  );
};

/** A class of time in the band's one bar. */
R.stripSeries = function (c, whole, width) {
  const colour = classColour(c);
  const share = (whole.parts.get(c.key) || 0) / whole.total_ns;
  const text =
    share * width >= (c.title.length + 7) * 7
      ? `${c.title} ${R.percent(share)}`
      : share * width >= 46
        ? R.percent(share)
        : "";
  return {
    type: "bar",
    stack: "step",
    barWidth: 40,
    data: [whole.parts.get(c.key) || 0],
    silent: true,
    emphasis: {disabled: true},
    itemStyle: {color: colour, decal: decal(c.pattern), borderColor: R.css("card"), borderWidth: 1},
    label: {
      show: text !== "",
      formatter: () => text,
      color: inkOn(colour),
      backgroundColor: colour,
      padding: [2, 4],
      fontSize: 12,
    },
  };
};
