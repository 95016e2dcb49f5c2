// The page of a comparison: verdict, what differs in the jobs, what moved, traffic, slow ranks, every figure. Built of the
// document with the tables and charts of the review's page.
"use strict";

(function () {
  const doc = R.doc;
  const h = R.h;
  R.brand = "traceanalyzer compare";
  R.sections = [];

  const NAMES = {launch_starved: "launch-starved", busy: "communication"};
  const MARKS = {moved: "≠", "did not move": "✓"};
  const COLOURS = {moved: "differs", "did not move": "match"};
  const TITLES = {moved: "Moved", "did not move": "Did not move", "cannot be told": "Cannot be told"};

  const rowName = (r) => {
    const what = NAMES[r.what] || r.what;
    const role = R.known(r.role) ? ` ${r.role}` : "";
    return `${what}${role}${R.known(r.stage) ? ` of stage ${r.stage}` : ""}`;
  };

  /** A figure in its unit; a change carries its sign. */
  function shown(value, unit, sign) {
    if (!R.known(value)) return "unknown";
    const plus = sign && Number(value) > 0 ? "+" : "";
    if (unit === "ns") return plus + R.time(typeof value === "bigint" ? value : Math.round(value));
    if (unit === "1") return `${plus}${(Number(value) * 100).toFixed(2)} ${sign ? "points" : "%"}`;
    return `${plus}${Number(value).toLocaleString("en", {maximumFractionDigits: 1})}`;
  }

  const percent = (value) =>
    R.known(value) ? `${Number(value) > 0 ? "+" : ""}${(Number(value) * 100).toFixed(2)} %` : "-";

  function cell(text, exact, unit) {
    if (text === "unknown") return h("span", {class: "unknown"}, text);
    return h("span", {class: "number", title: R.known(exact) ? `${R.count(exact)} ${unit}` : null}, text);
  }

  function band(spread, unit) {
    if (!R.known(spread)) return "-";
    if (!R.known(spread.low)) return "none: one step";
    const [low, high] = [shown(spread.low, unit), shown(spread.high, unit)];
    return low === high ? low : `${low} to ${high}`;
  }

  const verdictTag = (word, reason) =>
    h(
      "span",
      {class: `verdict ${{moved: "v-excess", "not moved": "v-match"}[word] || "v-unknown"}`, title: reason},
      word,
    );

  function section(key, title, lead, ...content) {
    const id = `s-${key}`;
    R.sections.push({id, title});
    return h(
      "section",
      {id, "aria-labelledby": `${id}-title`},
      h("h2", {id: `${id}-title`}, title),
      lead ? h("p", {class: "lead"}, lead) : null,
      content,
    );
  }

  function choice(label, options, change) {
    const select = h(
      "select",
      {onchange: () => change(select.value)},
      options.map(([value, text]) => h("option", {value}, R.short(text, 60))),
    );
    return h("label", {class: "control"}, h("span", {}, label), select);
  }

  // -- verdict --

  function sideLine(name, side) {
    const world = R.known(side.world_size) ? ` of ${R.count(side.world_size)}` : "";
    return h(
      "p",
      {class: "run"},
      h("span", {}, `${name} `, R.text(side.path, 100), R.known(side.selected) ? `@${side.selected}` : ""),
      h("span", {}, `step ${R.ranges(side.steps) || "none"}`),
      h("span", {}, `${R.count(side.ranks_recorded)}${world} ranks`),
      R.known(side.device) ? h("span", {}, R.text(side.device, 60)) : null,
      R.known(side.job) ? h("span", {}, R.text(side.job, 200)) : null,
    );
  }

  function figures() {
    const wanted = (doc.rows || []).filter(
      (r) => !R.known(r.stage) && ["step time", "tokens/s per device", "MFU"].includes(r.what),
    );
    return h(
      "dl",
      {class: "figures"},
      wanted
        .slice()
        .sort((a, b) => (a.what === "step time" ? -1 : b.what === "step time" ? 1 : 0))
        .map((r) =>
          h(
            "div",
            {},
            h("dt", {}, R.short(r.what, 40)),
            h("dd", {}, r.b ? shown(r.b.median, r.unit) : h("span", {class: "unknown"}, "unknown")),
            h("p", {}, `A: ${r.a ? shown(r.a.median, r.unit) : "unknown"}`),
            h("p", {}, R.known(r.ratio) ? `${percent(r.ratio - 1)}, ${r.verdict}` : r.verdict),
          ),
        ),
    );
  }

  function verdict() {
    const v = doc.verdict;
    R.sections.push({id: "s-verdict", title: "Verdict"});
    return h(
      "div",
      {class: "band", id: "s-verdict", "data-verdict": COLOURS[v.word] || "cannot be judged"},
      h("div", {}, sideLine("A", doc.a), sideLine("B", doc.b)),
      h("h1", {}, h("span", {"aria-hidden": "true"}, MARKS[v.word] || "?"), TITLES[v.word] || R.short(v.word, 60)),
      h("p", {class: "sentence"}, R.text(v.sentence, 800)),
      v.next ? h("p", {class: "next"}, h("b", {}, "Next: "), R.text(v.next, 300)) : null,
      figures(),
    );
  }

  // -- jobs --

  function settings() {
    const rows = [
      ...doc.job_differences.map((d) => ({kind: "job", name: d.field, ...d})),
      ...doc.setting_differences.map((d) => ({kind: "setting", ...d})),
    ];
    const of = (row, side) =>
      R.known(row[side])
        ? [
            R.text(String(row[side]), 80),
            row.stated && row.stated !== "both" && row.stated !== side ? " (not stated)" : "",
          ]
        : R.text(null);
    const table = rows.length
      ? R.table(
          [
            {key: "kind", title: "of", align: "l", cell: (r) => r.kind},
            {key: "name", title: "field", align: "l", cell: (r) => R.text(r.name, 60)},
            {key: "a", title: "A", align: "l", value: (r) => String(r.a), cell: (r) => of(r, "a")},
            {key: "b", title: "B", align: "l", value: (r) => String(r.b), cell: (r) => of(r, "b")},
          ],
          rows,
          {caption: "Fields of the job and of its setting that differ", noun: "field"},
        ).element
      : h(
          "p",
          {class: "empty"},
          R.known(doc.a.job) && R.known(doc.b.job)
            ? "Nothing that is recorded of the jobs and their settings differs."
            : "The jobs are not known of both; nothing that is recorded of their settings differs.",
        );
    return section(
      "jobs",
      "Jobs and settings",
      "What differs here may be why the figures below do.",
      table,
      doc.notes.length
        ? h(
            "ul",
            {class: "notes", style: {"margin-top": "10px"}},
            doc.notes.map((n) => h("li", {}, R.text(n, 300))),
          )
        : null,
    );
  }

  // -- what moved --

  const MOST_BARS = 16;

  function colourOf(row) {
    if (R.known(row.role)) return R.css(`c-${R.axisOf(row.role).toLowerCase()}`);
    const own = {compute: "c-compute", copy: "c-copy", launch_starved: "c-launch-starved"};
    return R.css(own[row.what] || "c-idle-strong");
  }

  function changes(rows) {
    // ECharts draws categories from the bottom up
    const bars = rows.slice(0, MOST_BARS).reverse();
    const label = `Change of each part of the step: ${rows
      .slice(0, MOST_BARS)
      .map((r) => `${rowName(r)} ${shown(r.change, "ns", true)}`)
      .join(", ")}`;
    return R.chart(
      (width) => {
        const narrow = width < 520;
        const values = bars.map((r) => Number(r.change));
        const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
        const room = Math.max(1, high - low) * (narrow ? 0.6 : 0.25); // for the labels at the bars' ends
        return {
          grid: {left: narrow ? 110 : 190, right: 20, top: 6, bottom: 30},
          xAxis: valueAxis((v) => R.time(Math.round(v)), {
            min: low < 0 ? low - room : 0,
            max: high > 0 || low === 0 ? high + room : 0,
            splitNumber: narrow ? 2 : 4,
            axisLabel: {
              ...axisText(),
              formatter: (v) => R.time(Math.round(v)),
              showMinLabel: false,
              showMaxLabel: false,
            },
          }),
          yAxis: categoryAxis(
            bars.map((r) => R.short(rowName(r), narrow ? 18 : 30)),
            {axisLabel: {width: narrow ? 100 : 180, overflow: "truncate"}},
          ),
          tooltip: {
            ...common().tooltip,
            formatter: (p) => {
              const r = bars[p.dataIndex];
              return tip(
                rowName(r),
                [
                  ["A", shown(r.a.median, "ns")],
                  ["band of A", band(r.a, "ns")],
                  ["B", shown(r.b.median, "ns")],
                  ["band of B", band(r.b, "ns")],
                  ["of the step", percent(r.share_of_step)],
                ],
                `${r.verdict}: ${r.reason}`,
              );
            },
          },
          series: [
            {
              type: "bar",
              barMaxWidth: 18,
              emphasis: {disabled: true},
              data: bars.map((r) => ({
                value: Number(r.change),
                itemStyle: {color: r.verdict === "not moved" ? mixed(colourOf(r), R.css("card"), 0.65) : colourOf(r)},
                label: {
                  show: true,
                  position: Number(r.change) < 0 ? "left" : "right",
                  color: R.css("ink"),
                  fontSize: 11,
                  formatter: `${shown(r.change, "ns", true)}${r.verdict === "moved" && !narrow ? ", moved" : ""}`,
                },
              })),
            },
          ],
        };
      },
      () => Math.max(1, bars.length) * 28 + 40,
      label,
    );
  }

  function stepTimes() {
    const sides = [
      ["B", doc.b],
      ["A", doc.a],
    ];
    const points = sides.flatMap(([, side], y) => side.step_times.map((s) => ({y, ...s})));
    if (points.length < 3) return null;
    return [
      h("h3", {}, "Step times"),
      R.chart(
        () => ({
          grid: {left: 34, right: 20, top: 8, bottom: 30},
          xAxis: valueAxis((v) => R.time(Math.round(v)), {scale: true, splitNumber: 4}),
          yAxis: categoryAxis(sides.map(([name]) => name)),
          tooltip: {
            ...common().tooltip,
            formatter: (p) => {
              const s = points[p.dataIndex];
              return tip(`${sides[s.y][0]}, step ${s.step}`, [["step time", R.time(s.step_ns)]]);
            },
          },
          series: [
            {
              type: "scatter",
              symbol: "circle",
              symbolSize: 9,
              emphasis: {disabled: true},
              itemStyle: {color: "transparent", borderColor: R.css("c-tp"), borderWidth: 1.5},
              data: points.map((s) => [Number(s.step_ns), s.y]),
            },
          ],
        }),
        110,
        `Step times of A and B: ${points.length} steps`,
      ),
    ];
  }

  function moved() {
    const parts = doc.rows
      .filter((r) => r.part_of_step && !R.known(r.stage) && R.known(r.change))
      .sort((a, b) => Math.abs(Number(b.change)) - Math.abs(Number(a.change)));
    const smaller = parts.length - MOST_BARS;
    const rest = smaller > 0 ? h("p", {class: "status"}, `${smaller} smaller parts: see All figures.`) : null;
    return section(
      "moved",
      "What moved",
      "Change of each part of the step, B against A: each instant of a step is in one of these parts. Lower medians over " +
        "the steps, so that changes need not add up to that of the step. Pale: it did not move.",
      parts.length ? [changes(parts), rest] : h("p", {class: "empty"}, "No part of the step is known of both."),
      stepTimes(),
    );
  }

  // -- traffic --

  function traffic() {
    if (!doc.traffic.length) {
      return section("traffic", "Traffic", null, h("p", {class: "empty"}, "Neither run holds calls in these steps."));
    }
    function differs(r) {
      if (!r.only_in) return [...r.differs, r.verdict === "moved" ? "time moved" : ""].filter(Boolean).join(", ");
      const other = r.only_in === "A" ? "B" : "A";
      return `only in ${r.only_in}${r.differs.includes("unknown") ? `, or of unknown role in ${other}` : ""}`;
    }
    const pair = (a, b) => (a === b || !a || !b ? a || b : `${a} → ${b}`);
    const sizes = (list) =>
      list.length > 1 ? `${R.bytes(list[0])} to ${R.bytes(list[list.length - 1])}` : list.length ? R.bytes(list[0]) : "";
    const number = (key, title, shownAs) => ({
      key,
      title,
      align: "r",
      cell: (r) => cell(shownAs(r[key]), null, ""),
    });
    const calls = (v) => (R.known(v) ? Number(v).toLocaleString("en", {maximumFractionDigits: 3}) : "unknown");
    const bytes = (v) => (R.known(v) ? R.bytes(v) : "unknown");
    const time = (key, title) => ({
      key,
      title,
      align: "r",
      value: (r) => (r[key] ? r[key].median : null),
      cell: (r) => (r[key] ? cell(R.time(r[key].median), r[key].median, "ns") : R.text(null)),
    });
    let only = doc.traffic.some((r) => differs(r)) ? "differs" : "all";
    const options = [
      ["differs", "that differ"],
      ["all", "all"],
    ];
    if (only === "all") options.reverse();
    const table = R.table(
      [
        {
          key: "role",
          title: "role",
          align: "l",
          cell: (r) =>
            h("span", {class: "role"}, R.swatch(R.axisOf(r.role).toLowerCase()), R.text(R.roleName(r.role), 24)),
        },
        {key: "phase", title: "phase", align: "l", cell: (r) => R.text(r.phase, 24)},
        {key: "op", title: "operation", align: "l", cell: (r) => R.text(r.op, 24)},
        {key: "component", title: "what", align: "l", wide: true, cell: (r) => R.text(r.component, 60)},
        {
          key: "differs",
          title: "differs",
          align: "l",
          value: differs,
          cell: (r) => (differs(r) ? h("span", {class: "differs"}, differs(r)) : "same"),
        },
        ...(doc.traffic.some((r) => R.known(r.stage))
          ? [{key: "stage", title: "stage", align: "r", cell: (r) => (R.known(r.stage) ? String(r.stage) : "all")}]
          : []),
        {
          key: "type",
          title: "type",
          align: "l",
          value: (r) => pair(r.dtypes_a.join(", "), r.dtypes_b.join(", ")),
          cell: (r) => R.text(pair(r.dtypes_a.join(", "), r.dtypes_b.join(", ")) || null, 60),
        },
        {
          key: "each",
          title: "each",
          align: "l",
          value: (r) => r.sizes_a[0] ?? r.sizes_b[0],
          cell: (r) => {
            if (r.by_data) return h("span", {class: "number"}, "by routing");
            const [a, b] = [sizes(r.sizes_a), sizes(r.sizes_b)];
            if (!a && !b) return R.text(null);
            const one = h("span", {class: "number"}, a || b);
            return a === b || !a || !b ? one : [one, " → ", h("span", {class: "number"}, b)];
          },
        },
        number("calls_a", "calls A", calls),
        number("calls_b", "calls B", calls),
        number("bytes_a", "bytes A", bytes),
        number("bytes_b", "bytes B", bytes),
        time("time_a", "time A"),
        time("time_b", "time B"),
        {
          key: "change",
          title: "change",
          align: "r",
          cell: (r) => (R.known(r.change) ? cell(shown(r.change, "ns", true), r.change, "ns") : "-"),
        },
      ],
      doc.traffic,
      {
        caption: "Calls of both runs, per rank and step",
        noun: "kind",
        keep: (r) => only === "all" || differs(r) !== "",
        filters: h(
          "div",
          {class: "controls"},
          choice("Calls", options, (value) => {
            only = value;
            table.update();
          }),
        ),
      },
    );
    const left = (doc.left_out || []).filter((l) => l.what === "traffic");
    return section(
      "traffic",
      "Traffic",
      "Per rank and step. Calls and bytes are exact; time is the sum of the calls' durations, waiting included.",
      table.element,
      left.map((l) => h("p", {class: "status"}, `Left out here: ${R.count(l.rows)} kinds of calls.`)),
    );
  }

  // -- every figure --

  function all() {
    let word = "";
    let stage = "";
    const stages = [...new Set(doc.rows.map((r) => r.stage).filter(R.known))].sort((a, b) => a - b);
    const words = [...new Set(doc.rows.map((r) => r.verdict))];
    const median = (side, title) => ({
      key: side,
      title,
      align: "r",
      value: (r) => (r[side] ? r[side].median : null),
      cell: (r) =>
        r[side] ? cell(shown(r[side].median, r.unit), r.unit === "ns" ? r[side].median : null, "ns") : R.text(null),
    });
    const range = (side, title) => ({
      key: `band_${side}`,
      title,
      align: "l",
      value: (r) => (r[side] ? r[side].low : null),
      cell: (r) => h("span", {class: "number"}, band(r[side], r.unit)),
    });
    const table = R.table(
      [
        {key: "what", title: "figure", align: "l", wide: true, value: rowName, cell: (r) => R.text(rowName(r), 60)},
        median("a", "A"),
        median("b", "B"),
        {
          key: "change",
          title: "change",
          align: "r",
          cell: (r) => (R.known(r.change) ? cell(shown(r.change, r.unit, true)) : "-"),
        },
        {key: "share_of_step", title: "of step", align: "r", cell: (r) => percent(r.share_of_step)},
        range("a", "band of A"),
        range("b", "band of B"),
        {key: "verdict", title: "verdict", align: "l", cell: (r) => verdictTag(r.verdict, r.reason)},
        {key: "reason", title: "why", align: "l", cell: (r) => h("span", {class: "number"}, R.short(r.reason, 80))},
      ],
      doc.rows,
      {
        caption: "Every figure of both runs",
        noun: "figure",
        keep: (r) => (word === "" || r.verdict === word) && (stage === "" || String(r.stage ?? "all") === stage),
        filters: h(
          "div",
          {class: "controls"},
          choice("Verdict", [["", "any"], ...words.map((w) => [w, w])], (value) => {
            word = value;
            table.update();
          }),
          stages.length
            ? choice(
                "Stage",
                [["", "any"], ["all", "all together"], ...stages.map((s) => [String(s), String(s)])],
                (value) => {
                  stage = value;
                  table.update();
                },
              )
            : null,
        ),
      },
    );
    return section(
      "figures",
      "All figures",
      "Means over ranks of each step, and of the steps the lower median. " +
        `Moved: ${doc.rules.moved} (${R.digits(doc.rules.least_share * 100)} %). Band: ${doc.rules.band}.`,
      table.element,
    );
  }

  // -- slow ranks --

  function slow() {
    const rows = doc.slow_ranks;
    if (!rows.length) {
      const none = "No rank computes slower than its like in most steps.";
      return section("slow", "Slow ranks", null, h("p", {class: "empty"}, none));
    }
    const side = (s, S) => [
      {key: `cause_${s}`, title: `cause in ${S}`, align: "l", cell: (r) => r[`cause_${s}`] || "not slow"},
      {
        key: `over_ns_${s}`,
        title: `more than its like in ${S}`,
        align: "r",
        cell: (r) => (R.known(r[`over_ns_${s}`]) ? cell(shown(r[`over_ns_${s}`], "ns", true)) : "-"),
      },
      {key: `slow_steps_${s}`, title: `slow steps of ${S}`, align: "r", cell: (r) => R.count(r[`slow_steps_${s}`])},
    ];
    return section(
      "slow",
      "Slow ranks",
      "Ranks whose computation stands out against their like in most of the steps (query slow_ranks).",
      R.table(
        [
          {key: "rank", title: "rank", align: "r", cell: (r) => R.count(r.rank)},
          {key: "stage", title: "stage", align: "r", cell: (r) => (R.known(r.stage) ? String(r.stage) : "-")},
          {key: "only_in", title: "slow in", align: "l", cell: (r) => r.only_in || "A and B"},
          ...side("a", "A"),
          ...side("b", "B"),
        ],
        rows,
        {caption: "Slow ranks of both runs", noun: "rank"},
      ).element,
    );
  }

  R.makers = [verdict, settings, moved, traffic, slow, all];
})();
