// The sections of the page, top to bottom. Each is made from its part of the document; an empty one says why.
"use strict";

const doc = R.doc;
const h = R.h;
R.sections = [];

/** The queries behind the figures of a section. */
const QUERIES = {
  time: ["exposed_split", "time_classes"],
  pipelines: ["bubble", "clocks"],
  ranks: ["step_time", "time_classes", "exposed_split", "bubble", "arrival_skew", "clocks"],
  skew: ["arrival_skew", "stragglers"],
  experts: ["expert_imbalance"],
  bandwidth: ["collective_bandwidth", "slow_groups"],
};

/** A query with its SQL and the command that asks it. */
function source(name) {
  const query = doc.appendix.queries.find((q) => q.name === name);
  return h(
    "div",
    {class: "evidence"},
    h("p", {class: "command"}, h("code", {}, `traceanalyzer query ${runArgument()} ${R.shell(name)}${jobArgument()}`)),
    R.folded(`SQL of ${name}`, () => sql(query)),
  );
}

/** A section. make() gives its content; nothing is content that says why. */
function section(key, title, lead, content) {
  const id = `s-${key}`;
  const left = (doc.left_out || []).filter((l) => String(l.what).includes(key.replace(/s$/, "")));
  const asked = (QUERIES[key] || []).filter((name) => ((doc.appendix || {}).queries || []).some((q) => q.name === name));
  const element = h(
    "section",
    {id, "aria-labelledby": `${id}-title`},
    h("h2", {id: `${id}-title`}, title),
    lead ? h("p", {class: "lead"}, lead) : null,
    content,
    left.map((l) => h("p", {class: "status"}, leftOut(l))),
    asked.length && !(content instanceof Element && content.classList.contains("empty")) ? R.folded(`Where it comes from: ${asked.join(", ")}`, () => h("div", {}, asked.map(source))) : null,
  );
  R.sections.push({id, title});
  return element;
}

const leftOut = (l) => ["Left out here: ", R.text(l.what, 120), ` (${R.count(l.rows)}).`];

const nothing = (key, sentence) => h("p", {class: "empty"}, R.text((doc.empty || {})[key] || sentence, 400));

/** A control with its label. */
function choice(label, options, value, change, more) {
  const select = h(
    "select",
    {...(more || {}), onchange: () => change(select.value)},
    options.map(([v, text]) => h("option", {value: v, selected: String(v) === String(value)}, R.short(text, 60))),
  );
  return h("label", {class: "control"}, h("span", {}, label), select);
}

const axisTag = (role) =>
  h("span", {class: "role"}, R.swatch(R.axisOf(role).toLowerCase()), R.text(R.roleName(role), 24));

// -- the step the page shows ------------------------------------------------------------------------------------------

const steps = doc.steps || [];
/** Which step is shown first: of the complete ones that of median duration, a step that occurred. */
function middleStep() {
  const whole = steps.filter((s) => s.complete !== false && R.known(s.step_ns));
  const of = (whole.length ? whole : steps).slice().sort((a, b) => Number(a.step_ns || 0) - Number(b.step_ns || 0));
  if (of.length) return of[Math.floor((of.length - 1) / 2)].step;
  return doc.time && doc.time.length ? doc.time[0].step : null;
}
R.step = middleStep();

/** The bars of a step: one per stage, and their sum. */
function barsOf(step) {
  const rows = (doc.time || []).filter((t) => t.step === step);
  return rows.map((t) => {
    const parts = new Map();
    for (const c of t.classes) {
      const key = R.timeClass(c).key;
      parts.set(key, (parts.get(key) || 0) + Number(c.dur_ns));
    }
    const total = R.sum(t.classes.map((c) => c.dur_ns));
    return {
      name: R.known(t.stage) ? `stage ${t.stage}` : "all ranks",
      stage: t.stage,
      devices: R.howMany(t.ranks) || 1,
      total_ns: total || 1,
      parts,
      row: t,
    };
  });
}

function classesOf(bars) {
  const found = new Map();
  for (const bar of bars)
    for (const entry of bar.row.classes)
      if (Number(entry.dur_ns)) {
        const c = R.timeClass(entry);
        found.set(c.key, c);
      }
  return [...found.values()].sort(R.byOrder);
}

function merged(bars) {
  const parts = new Map();
  for (const bar of bars) for (const [key, ns] of bar.parts) parts.set(key, (parts.get(key) || 0) + ns);
  return {
    name: "step",
    devices: R.sum(bars.map((b) => b.devices)),
    total_ns: R.sum(bars.map((b) => b.total_ns)),
    parts,
  };
}

/** Classes with their share and time. least: those of a smaller share are only counted. */
function legend(classes, whole, least = 0) {
  const share = (c) => (whole.parts.get(c.key) || 0) / whole.total_ns;
  const small = classes.filter((c) => share(c) < least);
  return h(
    "ul",
    {class: "legend"},
    classes
      .filter((c) => share(c) >= least)
      .map((c) =>
        h(
          "li",
          {},
          R.swatch(c.colour, c.pattern),
          h("span", {class: "legend-name"}, c.title),
          h("b", {}, R.percent(share(c))),
          h("span", {class: "legend-time"}, R.time(Math.round((whole.parts.get(c.key) || 0) / whole.devices))),
        ),
      ),
    small.length
      ? h("li", {class: "legend-time"}, `and ${small.length} more, ${R.percent(R.sum(small.map(share)))} together`)
      : null,
  );
}

// -- verdict ----------------------------------------------------------------------------------------------------------

const MARKS = {match: "✓", differs: "≠", "cannot be judged": "?", "no expectation": "–"};

const TITLES = {
  match: "Traffic matches",
  differs: "Traffic differs",
  "cannot be judged": "Traffic cannot be judged",
  "no expectation": "No expectation",
};

R.verdict = function () {
  const v = doc.verdict || {};
  const run = doc.run || {};
  const bar = h("div", {class: "strip"});
  const figures = h("dl", {class: "figures"});
  const step = () => steps.find((s) => s.step === R.step) || {};

  function figure(title, value, note) {
    return h("div", {}, h("dt", {}, title), h("dd", {}, value), note ? h("p", {}, note) : null);
  }

  function fill() {
    const s = step();
    const others = steps.filter((x) => R.known(x.step_ns)).map((x) => Number(x.step_ns));
    const why = () => (R.known(s.why_null) ? R.text(s.why_null, 200) : null);
    const spread =
      others.length > 1
        ? `${[...new Set([Math.min(...others), Math.max(...others)].map(R.time))].join(" to ")} over ${R.plural(others.length, "step")}`
        : s.complete === false
          ? "not recorded whole"
          : R.known(s.ranks)
            ? `longest of ${R.plural(R.howMany(s.ranks), "rank")}`
            : null;
    const typical = R.known(s.median_rank_ns) && s.median_rank_ns !== s.step_ns ? `; median rank ${R.time(s.median_rank_ns)}` : "";
    R.put(
      figures,
      figure("Step time", R.exact(s.step_ns, "ns"), `${spread || ""}${typical}` || null),
      figure(
        "Tokens/s per GPU",
        R.known(s.tokens_per_s_per_gpu)
          ? R.number(Math.round(s.tokens_per_s_per_gpu))
          : R.h("span", {class: "unknown"}, "unknown"),
        R.known(s.tokens_per_s_per_gpu) ? "tokens / step time / ranks" : why(),
      ),
      figure(
        "MFU",
        R.known(s.mfu) ? R.percent(s.mfu) : R.h("span", {class: "unknown"}, "unknown"),
        R.known(s.mfu)
          ? [
              R.known(s.hfu) ? `HFU ${R.percent(s.hfu)}; ` : "",
              doc.peak ? `of ${R.number(doc.peak.tflops)} TFLOP/s ${R.short(doc.peak.dtype || "", 20)}` : "",
            ]
          : R.known(s.tokens_per_s_per_gpu)
            ? why()
            : null,
      ),
    );
    const bars = barsOf(R.step);
    if (!bars.length) {
      R.put(bar);
      return;
    }
    const classes = classesOf(bars);
    const whole = merged(bars);
    const sentence = `Where the step goes: ${classes.map((c) => `${c.title} ${R.percent((whole.parts.get(c.key) || 0) / whole.total_ns)}`).join(", ")}`;
    R.put(
      bar,
      h(
        "h3",
        {},
        `Where ${R.known(R.step) ? `step ${R.step}` : "the step"} goes`,
        h("span", {class: "unit"}, " share of device time, exposed communication split by role"),
      ),
      R.strip(whole, classes, sentence),
      legend(classes, whole, 0.005),
    );
    R.drawAll();
  }

  const c = v.coverage;
  const band = h(
    "header",
    {class: "band", "data-verdict": v.word || "no expectation", id: "s-verdict"},
    h(
      "p",
      {class: "run"},
      R.text(run.path || "run", 80),
      run.job ? R.text(run.job, 160) : h("span", {}, "no job given"),
      run.device ? R.text(run.device, 60) : null,
    ),
    h(
      "h1",
      {},
      h("span", {class: "verdict-mark", "aria-hidden": "true"}, MARKS[v.word] || "?"),
      h("span", {}, TITLES[v.word] || R.text(v.word || "no verdict", 40)),
    ),
    h("p", {class: "sentence"}, R.text(v.sentence || "", 400)),
    v.next ? h("p", {class: "next"}, h("b", {}, "Next "), R.text(v.next, 300)) : null,
    steps.length > 1
      ? h(
          "div",
          {class: "controls"},
          choice(
            "Step",
            steps.map((s) => [s.step, `${s.step}${s.complete === false ? " (not whole)" : ""}`]),
            R.step,
            (value) => {
              R.step = steps.find((s) => String(s.step) === value).step;
              R.stepChanged.forEach((f) => f());
            },
          ),
        )
      : null,
    figures,
    coverage(c),
    bar,
  );
  R.stepChanged.push(fill);
  band.fill = fill;
  R.sections.push({id: "s-verdict", title: "Verdict"});
  return band;
};
R.stepChanged = [];

function coverage(c) {
  const run = doc.run || {};
  const present = c && c.ranks_present ? c.ranks_present.length : R.howMany(run.ranks_recorded);
  const declared = (c && c.ranks_declared) || run.world_size;
  const parts = [];
  if (R.known(present))
    parts.push([
      "ranks recorded",
      `${R.count(present)}${R.known(declared) ? ` of ${R.count(declared)}` : ""}`,
      R.known(declared) && declared ? present / declared : null,
    ]);
  if (c) {
    if (c.kernels)
      parts.push([
        "communication kernels with a role",
        `${R.count(c.kernels_attributed)} of ${R.count(c.kernels)}`,
        c.kernels_attributed / c.kernels,
      ]);
    if (c.bytes_known)
      parts.push([
        "bytes with a role",
        R.percent(Number(c.bytes_attributed) / Number(c.bytes_known)),
        Number(c.bytes_attributed) / Number(c.bytes_known),
      ]);
    const found = (c.steps || []).length ? `, step${c.steps.length === 1 ? "" : "s"} ${R.ranges(c.steps)}` : "";
    parts.push([`judged${found}`, R.percent(c.judged), c.judged]);
    parts.push(["calls", R.count(c.calls), null]);
  } else if ((run.steps || []).length)
    parts.push(["recorded", `step${run.steps.length === 1 ? "" : "s"} ${R.ranges(run.steps)}`, null]);
  return h(
    "dl",
    {class: "coverage", "aria-label": "Coverage"},
    parts.map(([name, value, share]) =>
      h(
        "div",
        {},
        h("dt", {}, name),
        h("dd", {}, value),
        R.known(share)
          ? h(
              "i",
              {class: "meter", "aria-hidden": "true"},
              h("i", {style: {width: `${Math.min(100, share * 100)}%`}, class: share >= 1 ? "full" : ""}),
            )
          : null,
      ),
    ),
  );
}

// -- findings ---------------------------------------------------------------------------------------------------------

const KINDS = {
  verdict: "traffic differs",
  avoidable: "avoidable traffic",
  time: "time",
  conflict: "job conflict",
  data: "input",
};

function ceiling(f) {
  const out = [];
  if (R.known(f.gain_ns_at_most))
    out.push(
      h(
        "div",
        {class: "gain"},
        h("span", {}, "at most "),
        h("b", {title: `${R.count(f.gain_ns_at_most)} ns`}, R.time(f.gain_ns_at_most)),
        h("span", {}, " a step"),
      ),
    );
  if (R.known(f.gain_bytes))
    out.push(
      h(
        "div",
        {class: "gain"},
        h("b", {title: `${R.count(f.gain_bytes)} bytes`}, R.bytes(f.gain_bytes)),
        h("span", {}, " a rank and step"),
      ),
    );
  if (!out.length && f.kind === "time") out.push(h("div", {class: "gain none"}, "gain not known"));
  return out;
}

const CONFIDENCE = {
  proven: "proven: another row or flag confirms it",
  likely: "likely: it fits, nothing confirms it",
  limit: "limit: a bound, not an estimate",
};

function finding(f, index) {
  const place = Object.entries(f.place || {}).filter(
    ([k, v]) =>
      R.known(v) && !(Array.isArray(v) && !v.length) && !(k === "axis" && R.axisOf((f.place || {}).role) === v), // said already
  );
  const evidence = f.evidence || [];
  return h(
    "li",
    {class: "finding", "data-kind": f.kind},
    h("div", {class: "finding-rank", "aria-hidden": "true"}, String(f.rank_of_finding || index + 1)),
    h(
      "div",
      {class: "finding-body"},
      h("h3", {}, R.text(f.sentence, 400)),
      h(
        "p",
        {class: "facts"},
        h("span", {class: "tag"}, KINDS[f.kind] || R.short(f.kind || "finding", 30)),
        h(
          "span",
          {class: "tag", title: CONFIDENCE[f.confidence] || null},
          R.short(f.confidence || "confidence unknown", 30),
        ),
        place.map(([k, v]) =>
          h(
            "span",
            {class: "place"},
            k === "role" || k === "axis" ? [R.swatch(R.axisOf(v).toLowerCase())] : null,
            `${k === "ranks" && (v || []).length === 1 ? "rank" : k} `,
            R.text(Array.isArray(v) ? R.ranges(v) : k === "role" ? R.roleName(v) : v, 50),
          ),
        ),
        R.known(f.because_of) ? h("span", {class: "place"}, `because of finding ${f.because_of}`) : null,
        f.code ? h("code", {}, R.short(f.code, 50)) : null,
      ),
      f.remedy ? h("p", {class: "remedy"}, h("b", {}, "Remedy "), R.text(f.remedy, 400)) : null,
      evidence.length
        ? R.folded(evidence.length === 1 ? "Evidence" : `Evidence (${evidence.length})`, () =>
            h("div", {}, evidence.map(evidenceOf)),
          )
        : null,
    ),
    h("div", {class: "finding-gain"}, ceiling(f)),
  );
}

/** The run as an argument of a command to copy. */
const runArgument = () => R.shell((doc.run || {}).path || "run.parquet");

/** What such a command also needs: the job file, where the run holds no job. */
const jobArgument = () => ((doc.run || {}).job && (doc.run || {}).job_in_run === false ? " --job FILE" : "");

function evidenceOf(e) {
  const rows = e.rows || [];
  const name = R.short(e.query || "the run", 60);
  const query = ((doc.appendix || {}).queries || []).find((q) => q.name === e.query);
  const parameters = Object.entries(e.parameters || {}).filter(([, v]) => R.known(v));
  const asked = parameters.map(([k, v]) => ` --param ${R.shell(`${k}=${v}`)}`).join("");
  return h(
    "div",
    {class: "evidence"},
    e.sentence ? h("p", {}, R.text(e.sentence, 400)) : null,
    rows.length ? R.table(R.columnsOf(rows), rows, {caption: `Rows of ${name}`}).element : null,
    query
      ? [
          h("p", {class: "command"}, h("code", {}, `traceanalyzer query ${runArgument()} ${R.shell(e.query)}${asked}${jobArgument()}`)),
          R.folded(`SQL of ${name}`, () => sql(query)),
        ]
      : h("p", {class: "command"}, `From ${name}.`),
  );
}

const sql = (query) =>
  h(
    "div",
    {},
    query.gives ? h("p", {}, R.text(query.gives, 400)) : null,
    h("pre", {tabindex: "0"}, h("code", {}, String(query.sql))),
  );

R.findings = function () {
  const found = doc.findings || [];
  const list = (part, from) =>
    h(
      "ol",
      {class: "findings", start: from + 1},
      part.map((f, i) => finding(f, from + i)),
    );
  const shown = 7;
  return section(
    "findings",
    "Findings",
    "What is wrong first, then what has a cause, by what a step could save without it; an effect stands beneath its cause, and " +
      "last where time goes without anything being wrong. A gain is a ceiling, never a forecast: what hides behind it is not known.",
    found.length
      ? [
          list(found.slice(0, shown), 0),
          found.length > shown
            ? R.folded(`${R.plural(found.length - shown, "finding")} more`, () => list(found.slice(shown), shown))
            : null,
        ]
      : nothing(
          "findings",
          (doc.verdict || {}).word === "match"
            ? "Nothing stands out: no avoidable traffic and no loss of time was found in what was recorded."
            : "None. What was not recorded, or could not be judged, can give no finding.",
        ),
  );
};

// -- time -------------------------------------------------------------------------------------------------------------

/** One bar, without axes: the step as the band shows it. */
R.strip = function (whole, classes, label) {
  return R.chart(
    (width) => ({
      grid: {left: 0, right: 0, top: 0, bottom: 0},
      xAxis: {type: "value", show: false, min: 0, max: whole.total_ns},
      yAxis: {type: "category", show: false, data: ["step"]},
      series: classes.map((c) => R.stripSeries(c, whole, width)),
      tooltip: {show: false},
    }),
    40,
    label,
  );
};

R.timeSplit = function () {
  const rows = doc.time || [];
  const content = h("div");
  function fill() {
    const bars = barsOf(R.step);
    if (!bars.length) {
      R.put(content, nothing("time", "No time of this step was recorded."));
      return;
    }
    const classes = classesOf(bars);
    const whole = merged(bars);
    const columns = [
      {key: "stage", title: "stage", cell: (r) => r.bar.name, value: (r) => r.bar.stage},
      {
        key: "title",
        title: "class",
        cell: (r) => h("span", {class: "role"}, R.swatch(r.c.colour, r.c.pattern), r.c.title),
        value: (r) => r.c.title,
      },
      {key: "share", title: "of the step", align: "r", value: (r) => r.share, cell: (r) => R.percent(r.share)},
      {
        key: "mean",
        title: "per device",
        align: "r",
        value: (r) => r.ns / r.bar.devices,
        cell: (r) => R.time(Math.round(r.ns / r.bar.devices)),
      },
      {key: "ns", title: "sum, ns", align: "r", value: (r) => r.ns, cell: (r) => R.count(r.ns)},
    ];
    const flat = bars.flatMap((bar) =>
      classes
        .filter((c) => bar.parts.get(c.key))
        .map((c) => ({bar, c, ns: bar.parts.get(c.key), share: bar.parts.get(c.key) / bar.total_ns})),
    );
    const few = bars.length > 32;
    R.put(
      content,
      R.timeChart(
        few ? bars.slice(0, 32) : bars,
        classes,
        `Time of step ${R.step} by stage: ${bars
          .slice(0, 8)
          .map(
            (b) =>
              `${b.name} ${classes.map((c) => `${c.title} ${R.percent((b.parts.get(c.key) || 0) / b.total_ns)}`).join(", ")}`,
          )
          .join("; ")}`,
      ),
      legend(classes, whole),
      R.folded(
        "The same as a table",
        () => R.table(columns, flat, {caption: `Time of step ${R.step} by stage and class`}).element,
      ),
    );
    R.drawAll();
  }
  if (rows.length) R.stepChanged.push(fill);
  const s = section(
    "time",
    "Step time by stage",
    rows.length
      ? "Every nanosecond of a device has one class, so each bar is the whole step, the mean over the stage's devices. " +
          "Striped: waiting for peers. Dotted: exposed, not split into transfer and waiting." +
          (rows.some((t) => t.classes.some((c) => c.class === "bubble"))
            ? ""
            : rows.some((t) => t.classes.some((c) => R.axisOf(c.role) === "PP"))
              ? " Waiting of PP and idle time in the pipeline's window are its bubble, shown below."
              : "")
      : null,
    rows.length ? content : nothing("time", "No device activity with times was recorded, so the step cannot be split."),
  );
  s.fill = rows.length ? fill : null;
  return s;
};

// -- pipeline ---------------------------------------------------------------------------------------------------------

R.pipeline = function () {
  const all = doc.pipelines || [];
  if (!all.length)
    return section(
      "pipelines",
      "Pipeline",
      null,
      nothing("pipelines", "The job has one pipeline stage, or no pipeline was recognised in the recording."),
    );
  const content = h("div");
  let chosen = Math.max(
    0,
    all.findIndex((p) => p.step === R.step),
  );
  function fill() {
    const p = all[chosen];
    const kinds = [...new Set((p.boxes || []).map((b) => b.kind))];
    const odd = (p.boxes || []).some((b) => (b.chunk || 0) % 2);
    const chart = (p.boxes || []).length
      ? R.pipelineChart(
          p,
          `Pipeline ${p.pipeline}, step ${p.step}: ${R.plural(p.boxes.length, "pass", "passes")} over ${R.time(p.window_ns)}; bubble ${(p.stages || []).map((s) => `stage ${s.stage} ${R.percent(s.bubble_of_total)}`).join(", ")}`,
        )
      : null;
    const shares = (p.stages || []).map((s) => s.bubble_of_total).filter(R.known);
    const facts = [
      ["window", R.time(p.window_ns)],
      [
        "bubble measured",
        shares.length
          ? R.percent(Math.min(...shares)) === R.percent(Math.max(...shares))
            ? R.percent(shares[0])
            : `${R.percent(Math.min(...shares))} to ${R.percent(Math.max(...shares))}`
          : "unknown",
      ],
      [
        "by the schedule's formula",
        R.known(p.formula_share)
          ? `${R.percent(p.formula_share)}${p.formula ? `   ${R.short(p.formula, 80)}` : ""}`
          : p.formula
            ? R.short(p.formula, 120)
            : "unknown",
      ],
      [
        "clocks",
        `${R.short(p.clocks || "unknown", 60)}${R.known(p.residual_ns) ? `, open ${R.time(p.residual_ns)}` : ""}`,
      ],
    ];
    const button = (text, label, act) => h("button", {type: "button", "aria-label": label, onclick: act}, text);
    R.put(
      content,
      h(
        "div",
        {class: "controls"},
        all.length > 1
          ? choice(
              "Pipeline",
              all.map((x, i) => [i, `first rank ${x.pipeline}, step ${x.step}`]),
              chosen,
              (v) => {
                chosen = Number(v);
                fill();
              },
            )
          : null,
        chart
          ? h(
              "div",
              {class: "buttons", role: "group", "aria-label": "Zoom"},
              button("−", "Zoom out", () => chart.zoom(2)),
              button("+", "Zoom in", () => chart.zoom(0.5)),
              button("◀", "Earlier", () => chart.move(-0.5)),
              button("▶", "Later", () => chart.move(0.5)),
              button("Whole step", "Show the whole step", () => chart.whole()),
            )
          : null,
        h(
          "ul",
          {class: "legend inline"},
          kinds.map((k) => [
            h("li", {}, h("i", {class: `swatch box-${k}`, "aria-hidden": "true"}), k),
            odd && k !== "recompute"
              ? h("li", {}, h("i", {class: `swatch box-${k}-odd`, "aria-hidden": "true"}), `${k}, odd chunk`)
              : null,
          ]),
          chart ? h("li", {}, h("i", {class: "swatch box-track", "aria-hidden": "true"}), "bubble or other work") : null,
        ),
      ),
      chart
        ? chart.element
        : nothing(
            "pipelines",
            "The passes of the micro-batches were not recognised: only the figures of the stages are known.",
          ),
      h(
        "dl",
        {class: "inline-facts"},
        facts.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))),
      ),
      (p.stages || []).length
        ? R.folded(
            "Stages as a table",
            () => R.table(R.columnsOf(p.stages), p.stages, {caption: "Query bubble: stages of this pipeline"}).element,
          )
        : null,
      (p.boxes || []).length
        ? R.folded(
            "Passes as a table",
            () => R.table(R.columnsOf(p.boxes), p.boxes, {caption: "Passes of micro-batches", noun: "pass"}).element,
          )
        : null,
    );
    R.pipelineView = chart;
    R.drawAll();
  }
  R.stepChanged.push(() => {
    const i = all.findIndex((p) => p.step === R.step && p.pipeline === all[chosen].pipeline);
    if (i >= 0 && i !== chosen) {
      chosen = i;
      fill();
    }
  });
  const s = section(
    "pipelines",
    "Pipeline",
    "Stages down, time across, one box per pass of a micro-batch, as measured; the numbers are micro-batches from 0. What no box covers is bubble or other work. Beside each stage: its bubble, of the window. Ctrl and wheel zooms.",
    content,
  );
  s.fill = fill;
  return s;
};

// -- ledger -----------------------------------------------------------------------------------------------------------

const DTYPES = {
  bfloat16: "bf16",
  float16: "f16",
  float32: "f32",
  float64: "f64",
  int64: "i64",
  int32: "i32",
  int8: "i8",
  uint8: "u8",
};
const BADNESS = {missing: 0, unexpected: 1, excess: 2, unknown: 3, match: 4};
const VERDICT_MARK = {match: "✓", excess: "↑", missing: "−", unexpected: "+", unknown: "?"};
const what = (c) => (c.components || []).join(", ");

function verdictTag(c) {
  return h(
    "span",
    {class: `verdict v-${c.verdict in BADNESS ? c.verdict : "unknown"}`},
    h("span", {"aria-hidden": "true"}, `${VERDICT_MARK[c.verdict] || "?"} `),
    R.short(c.verdict || "unknown", 30),
  );
}

function ledgerDetail(cells) {
  return function (c) {
    const facts = [
      [
        "payload of one call",
        R.known(c.payload_bytes_each)
          ? `${R.count(c.payload_bytes_each)} bytes`
          : c.varies
            ? "depends on the routing"
            : "unknown",
      ],
      [
        "payload a rank and step",
        `expected ${R.count(c.payload_bytes_expected)}, measured ${R.count(c.payload_bytes_measured)} bytes`,
      ],
      [
        "off-rank a rank and step",
        `expected ${R.count(c.off_rank_bytes_expected)}, measured ${R.count(c.off_rank_bytes_measured)} bytes`,
      ],
      ["group", R.known(c.group_size) ? R.plural(c.group_size, "rank") : "unknown"],
      ["stage", R.known(c.stage) ? String(c.stage) : "every stage"],
      ["ranks", R.ranges(c.ranks || []) || "none"],
      ["steps", R.ranges(c.steps || []) || "none"],
      R.known(c.link_time_ns)
        ? ["time at the links' bandwidth", `${R.time(c.link_time_ns)} (measured ${R.time(c.time_ns)})`]
        : null,
      ["role known by", (c.role_evidence || []).join(", ") || "nothing"],
      c.transport ? ["transport", c.transport] : null,
      c.varies && c.rows_that_vary
        ? [
            "rows that depend on the routing",
            `${R.count(c.rows_that_vary.least)} to ${R.count(c.rows_that_vary.most)}, ${R.count(c.rows_that_vary.balanced)} if balanced`,
          ]
        : null,
      c.reason ? ["why unknown", c.reason] : null,
      (c.related_cells || []).length ? ["belongs to rows", c.related_cells.map((n) => n + 1).join(", ")] : null,
    ].filter(Boolean);
    return h(
      "div",
      {class: "ledger-detail"},
      c.cause
        ? h(
            "p",
            {},
            h("b", {}, "Cause "),
            h("code", {}, R.short(c.cause.code, 60)),
            " ",
            R.text(c.cause.sentence, 400),
            ` (${R.short(c.cause.confidence, 20)})`,
          )
        : null,
      (c.avoidable || []).map((a) =>
        h(
          "p",
          {},
          h("b", {}, "Avoidable "),
          `${R.bytes(c.avoidable_bytes)} off-rank a rank and step: `,
          h("code", {}, R.short(a.code, 60)),
          a.setting ? [": ", R.text(a.setting, 200), " removes it"] : ": no setting removes it",
        ),
      ),
      h(
        "dl",
        {class: "facts-list"},
        facts.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, R.text(v, 160)))),
      ),
      (c.expected || []).length
        ? [
            h("h4", {}, "Expected of"),
            (c.expected || []).map((e) =>
              h(
                "div",
                {class: "formula"},
                h(
                  "p",
                  {},
                  h("b", {}, R.text(e.component, 120)),
                  R.known(e.calls) ? `  ${R.plural(e.calls, "call")} a step` : "",
                  e.rule ? h("span", {class: "muted"}, `  ${R.short(e.rule, 80)}`) : null,
                ),
                h(
                  "dl",
                  {},
                  Object.entries(e.formula || {}).map(([k, v]) => [
                    h("dt", {}, k),
                    h("dd", {}, h("code", {}, R.text(v, 300))),
                  ]),
                ),
                e.evidence && !R.known((e.formula || {}).source)
                  ? h(
                      "p",
                      {class: "muted"},
                      "source: ",
                      R.text(typeof e.evidence === "string" ? e.evidence : Object.values(e.evidence).join(": "), 200),
                    )
                  : null,
              ),
            ),
          ]
        : [
            h("h4", {}, "Components"),
            h(
              "ul",
              {class: "components"},
              (c.components || []).map((x) => h("li", {}, R.text(x, 120))),
            ),
          ],
      h(
        "p",
        {class: "command"},
        h("code", {}, `traceanalyzer diff ${runArgument()} --explain ${cells.indexOf(c) + 1}${jobArgument()}`),
      ),
    );
  };
}

R.ledger = function () {
  const diff = doc.ledger;
  if (!diff || !(diff.cells || []).length)
    return section(
      "ledger",
      "Traffic",
      null,
      nothing(
        "ledger",
        "No expectation: no job was given or found in the run, so the traffic has nothing to be compared with. Give one with --job.",
      ),
    );
  const cells = diff.cells;
  const number = new Map(cells.map((c, i) => [c, i + 1]));
  const state = {verdict: "", axis: "", text: "", avoidable: false};
  const judged = diff.coverage || {};
  const staged = new Set(cells.map((c) => c.stage)).size > 1;
  const same = (a, b) => !a || !b || (a.length === b.length && a.every((x, i) => x === b[i]));
  const many = (noun, list) => `${noun}${list.length === 1 ? "" : "s"} ${R.ranges(list)}`;
  /** Stage, ranks and steps of a row, as far as not every row has them. */
  const where = (c) =>
    [
      staged && R.known(c.stage) ? `stage ${c.stage}` : "",
      same(c.ranks, judged.ranks_present) ? "" : many("rank", c.ranks),
      same(c.steps, judged.steps) ? "" : many("step", c.steps),
    ]
      .filter(Boolean)
      .join(", ");
  const verdicts = [...new Set(cells.map((c) => c.verdict))].sort((a, b) => (BADNESS[a] ?? 9) - (BADNESS[b] ?? 9));
  const axes = [...R.axes, "other", "unknown"].filter((a) => cells.some((c) => R.axisOf(c.role) === a));
  const timeCell = (key) => (c) => (c.calls_measured === 0 ? "–" : R.exact(c[key], "ns")); // no call has no time
  const bytesCell = (key) => (c) =>
    !R.known(c[key])
      ? key.endsWith("expected")
        ? h("span", {class: "unknown", title: "nothing says how many"}, "–")
        : R.exact(null)
      : h(
          "span",
          {class: "number", title: `${R.count(c[key])} bytes`},
          `${c.varies && key.endsWith("measured") && c[key] ? "~" : ""}${R.bytes(c[key])}`,
        );
  const columns = [
    {key: "#", title: "#", align: "r", value: (c) => number.get(c), cell: (c) => String(number.get(c))},
    {key: "verdict", title: "verdict", value: (c) => BADNESS[c.verdict] ?? 9, cell: verdictTag},
    {
      key: "role",
      title: "role, phase",
      value: (c) => (R.known(c.role) ? `${[...R.axes, "other"].indexOf(R.axisOf(c.role))} ${c.role} ${c.phase}` : null),
      cell: (c) => [axisTag(c.role), h("div", {class: "muted"}, R.text(c.phase, 20))],
    },
    {
      key: "op",
      title: "operation",
      value: (c) => `${c.op} ${c.dtype}`,
      cell: (c) => [
        R.text(c.op, 30),
        h("div", {class: "muted"}, R.known(c.dtype) ? R.short(DTYPES[c.dtype] || c.dtype, 16) : "type unknown"),
      ],
    },
    {
      key: "what",
      title: "what",
      wide: true,
      value: what,
      cell: (c) => [
        R.text(what(c) || "–", 90),
        c.cause ? [" ", h("span", {class: "cause", title: c.cause.sentence}, R.short(c.cause.code, 40))] : null,
        where(c) ? h("div", {class: "muted"}, R.text(where(c), 60)) : null,
      ],
    },
    {
      key: "payload_bytes_each",
      title: "each",
      align: "r",
      value: (c) => c.payload_bytes_each,
      cell: (c) => (c.varies ? "~" : R.exact(c.payload_bytes_each, "bytes")),
    },
    {
      key: "calls_expected",
      title: "calls exp.",
      doc: "calls expected",
      align: "r",
      value: (c) => c.calls_expected,
      cell: (c) => (R.known(c.calls_expected) ? R.count(c.calls_expected) : "–"),
    },
    {
      key: "calls_measured",
      title: "calls meas.",
      doc: "calls measured",
      align: "r",
      value: (c) => c.calls_measured,
      cell: (c) =>
        h(
          "span",
          {class: R.known(c.calls_expected) && c.calls_expected !== c.calls_measured ? "differs" : null},
          R.count(c.calls_measured),
        ),
    },
    {
      key: "off_rank_bytes_expected",
      title: "off-rank exp.",
      doc: "off-rank bytes expected",
      align: "r",
      value: (c) => c.off_rank_bytes_expected,
      cell: bytesCell("off_rank_bytes_expected"),
    },
    {
      key: "off_rank_bytes_measured",
      title: "off-rank meas.",
      doc: "off-rank bytes measured",
      align: "r",
      value: (c) => c.off_rank_bytes_measured,
      cell: bytesCell("off_rank_bytes_measured"),
    },
    {
      key: "avoidable_bytes",
      title: "avoidable",
      align: "r",
      value: (c) => c.avoidable_bytes,
      cell: (c) =>
        c.avoidable_bytes
          ? h("b", {title: `${R.count(c.avoidable_bytes)} bytes`}, R.bytes(c.avoidable_bytes))
          : R.known(c.avoidable_bytes)
            ? h("span", {class: "muted"}, "0")
            : R.exact(null),
    },
    {key: "time_ns", title: "time", align: "r", value: (c) => c.time_ns, cell: timeCell("time_ns")},
    {
      key: "exposed_ns",
      title: "exposed",
      align: "r",
      value: (c) => c.exposed_ns,
      cell: timeCell("exposed_ns"),
    },
    {
      key: "bus",
      title: "GB/s",
      doc: "bus bandwidth: bytes over time, waiting included",
      align: "r",
      value: (c) => c.bus_bandwidth_bytes_per_s,
      cell: (c) =>
        R.known(c.bus_bandwidth_bytes_per_s)
          ? R.digits(c.bus_bandwidth_bytes_per_s / 1e9)
          : c.calls_measured === 0
            ? "–"
            : R.exact(null),
    },
  ];
  let table;
  const search = h("input", {
    type: "search",
    placeholder: "component, operation, cause",
    oninput: () => {
      state.text = search.value.toLowerCase();
      table.update();
    },
  });
  const only = h("input", {
    type: "checkbox",
    onchange: () => {
      state.avoidable = only.checked;
      table.update();
    },
  });
  const filters = h(
    "div",
    {class: "controls", role: "search", "aria-label": "Rows of the ledger"},
    choice("Verdict", [["", "all"], ...verdicts.map((v) => [v, v])], "", (v) => {
      state.verdict = v;
      table.update();
    }),
    choice("Axis", [["", "all"], ...axes.map((a) => [a, a])], "", (v) => {
      state.axis = v;
      table.update();
    }),
    h("label", {class: "control"}, h("span", {}, "Contains"), search),
    h("label", {class: "control check"}, only, h("span", {}, "avoidable only")),
  );
  table = R.table(columns, cells, {
    caption: "Expected and measured traffic of a rank and step",
    detail: ledgerDetail(cells),
    filters,
    noun: "row",
    part: 40,
    keep: (c) =>
      (!state.verdict || c.verdict === state.verdict) &&
      (!state.axis || R.axisOf(c.role) === state.axis) &&
      (!state.avoidable || c.avoidable_bytes > 0) &&
      (!state.text ||
        [
          c.role,
          c.phase,
          c.op,
          c.dtype,
          what(c),
          where(c),
          c.verdict,
          c.reason,
          c.cause && c.cause.code,
          c.cause && c.cause.sentence,
        ].some((x) => R.known(x) && String(x).toLowerCase().includes(state.text))),
  });
  R.ledgerTable = table;
  const tally = verdicts.map((v) => `${R.count(cells.filter((c) => c.verdict === v).length)} ${v}`).join(", ");
  const notes = [
    (diff.job_conflicts || []).map((x) => h("li", {}, h("b", {}, "job conflict "), R.text(x.sentence, 300))),
    (diff.not_in_window || []).length
      ? h(
          "li",
          {},
          `Not in the window: ${diff.not_in_window.map((x) => R.short(x, 60)).join(", ")} (no such kernels in the recording).`,
        )
      : null,
    R.known(diff.first_step)
      ? h("li", {}, `Step ${diff.first_step} judged as a first step, in which overlapped traffic runs at other places.`)
      : null,
    ((diff.coverage || {}).unattributed || []).map((u) =>
      h(
        "li",
        {},
        h("b", {}, "unattributed "),
        R.text(u.name, 100),
        `, ${R.plural(u.kernels, "kernel")}, ${R.time(u.time_ns)} (`,
        R.text(u.why, 120),
        ")",
      ),
    ),
  ]
    .flat()
    .filter(Boolean);
  return section(
    "ledger",
    "Traffic: expected and measured",
    `${tally}. Calls and bytes are of one rank and step; off-rank bytes are ring-equivalent, one direction. Rules: ${R.short(diff.rules || "megatron", 40)}${diff.version === "all" ? ", every release, because neither job nor run names one" : ` ${R.short(diff.version || "", 40)}`}.`,
    [notes.length ? h("ul", {class: "notes"}, notes) : null, table.element],
  );
};

// -- ranks ------------------------------------------------------------------------------------------------------------

/** The metric shown first: of those in time the one in which the ranks lie furthest apart. */
function telling(rows, metrics) {
  const apart = (m) => {
    const values = rows
      .map((r) => r[m.key])
      .filter(R.known)
      .map(Number);
    return values.length ? Math.max(...values) - Math.min(...values) : 0;
  };
  const times = metrics.filter((m) => m.unit === "ns" && !m.key.startsWith("clock_") && apart(m) > 0);
  return (times.sort((a, b) => apart(b) - apart(a))[0] || metrics[0]).key;
}

R.ranks = function () {
  const ranks = doc.ranks || {};
  const rows = ranks.rows || [];
  const metrics = ranks.metrics || [];
  if (!rows.length || !metrics.length)
    return section("ranks", "Ranks", null, nothing("ranks", "No figure of single ranks was recorded."));
  const axes = (ranks.axes || []).filter((a) => new Set(rows.map((r) => r[a]).filter(R.known)).size > 1);
  const size = (a) => new Set(rows.map((r) => r[a])).size;
  // ep lies inside dp: where both differ, tp, cp, pp and dp name a rank, and ep is left folded at first.
  const state = {
    metric: telling(rows, metrics),
    place: Object.fromEntries(
      axes.map((a) => [a, a === "pp" ? "rows" : a === "ep" && axes.includes("dp") ? "off" : "columns"]),
    ),
  };
  if (axes.includes("dp") && axes.filter((a) => a !== "ep").reduce((n, a) => n * size(a), 1) > 16)
    state.place.dp = "rows";
  if (rows.length > 64 && axes.length) {
    // about three times as wide as high, stages down where that is no worse
    let best = null;
    const free = axes.filter((a) => state.place[a] !== "off");
    for (let bits = 0; bits < 2 ** free.length; bits++) {
      const across = free.filter((_, i) => bits & (1 << i));
      const down = free.filter((_, i) => !(bits & (1 << i)));
      const product = (of) => of.reduce((n, a) => n * size(a), 1);
      const score = Math.abs(Math.log(product(across) / product(down) / 3)) + (across.includes("pp") ? 0.8 : 0);
      if (best === null || score < best.score) best = {score, across};
    }
    for (const a of free) state.place[a] = best.across.includes(a) ? "columns" : "rows";
  }
  const wrap = rows.length > 32 ? 32 : rows.length; // without coordinates: ranks in lines of so many
  const content = h("div");
  const collate = (list) => {
    const seen = new Map();
    for (const k of list.sort((a, b) => {
      for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return (a[i] ?? -1) - (b[i] ?? -1);
      return 0;
    }))
      seen.set(k.join(","), k);
    return [...seen.values()];
  };
  function fill() {
    const metric = metrics.find((m) => m.key === state.metric);
    const on = (where) =>
      (ranks.axes || [])
        .filter((a) => state.place[a] === where)
        .sort((a, b) => ["pp", "dp", "ep", "cp", "tp"].indexOf(a) - ["pp", "dp", "ep", "cp", "tp"].indexOf(b));
    const [xs, ys] = [on("columns"), on("rows")];
    const tuple = (r, of) =>
      axes.length ? of.map((a) => r[a]) : [of === xs ? r.rank % wrap : Math.floor(r.rank / wrap)];
    let lines = [];
    const named = (of) => (k) =>
      axes.length
        ? k.map((v, i) => `${of[i]}${R.known(v) ? v : "?"}`).join(" ")
        : of === xs
          ? wrap < 32
            ? `rank ${k[0]}`
            : `+${k[0]}`
          : lines.length > 1
            ? `rank ${k[0] * wrap}`
            : "";
    const columns = collate(rows.map((r) => tuple(r, xs)));
    lines = collate(rows.map((r) => tuple(r, ys)));
    const [xAt, yAt] = [
      new Map(columns.map((k, i) => [k.join(","), i])),
      new Map(lines.map((k, i) => [k.join(","), i])),
    ];
    const groups = new Map();
    for (const r of rows) {
      const key = `${xAt.get(tuple(r, xs).join(","))}|${yAt.get(tuple(r, ys).join(","))}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(r);
    }
    const values = rows
      .map((r) => r[metric.key])
      .filter(R.known)
      .map(Number);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const cells = [...groups].map(([key, members]) => {
      const [x, y] = key.split("|").map(Number);
      const worst = members
        .filter((r) => R.known(r[metric.key]))
        .sort((a, b) => Number(b[metric.key]) - Number(a[metric.key]))[0];
      const value = worst ? Number(worst[metric.key]) : null;
      return {
        x,
        y,
        value,
        shown: R.inUnit(value, metric.unit),
        colour: () => R.ramp(high > low ? (value - low) / (high - low) : 0.5),
        tip: [
          members.length === 1
            ? `Rank ${members[0].rank}`
            : `${R.plural(members.length, "rank")}: the largest of rank ${worst ? worst.rank : "?"}`,
          [
            [metric.title, worst ? R.inUnit(worst[metric.key], metric.unit) : "unknown"],
            [
              "coordinates",
              (ranks.axes || [])
                .filter((a) => R.known((worst || members[0])[a]))
                .map((a) => `${a}${(worst || members[0])[a]}`)
                .join(" "),
            ],
            ["host", (worst || members[0]).host || null],
          ],
        ],
      };
    });
    const missing = rows.length - values.length;
    const table = () =>
      R.table(
        [
          {key: "rank", title: "rank", align: "r", cell: (r) => String(r.rank)},
          ...(ranks.axes || []).map((a) => ({
            key: a,
            title: a,
            align: "r",
            cell: (r) => (R.known(r[a]) ? String(r[a]) : R.exact(null)),
          })),
          {key: "host", title: "host", cell: (r) => R.text(r.host, 40)},
          ...metrics.map((m) => ({
            key: m.key,
            title: m.title,
            align: "r",
            doc: m.doc,
            cell: (r) => R.exact(r[m.key], m.unit),
          })),
        ],
        rows,
        {caption: "Figures of every rank", noun: "rank"},
      ).element;
    R.put(
      content,
      h(
        "div",
        {class: "controls"},
        choice(
          "Colour",
          metrics.map((m) => [m.key, m.title]),
          state.metric,
          (v) => {
            state.metric = v;
            fill();
            content.querySelector("select").focus();
          },
        ),
        axes.map((a) =>
          choice(
            a.toUpperCase(),
            [
              ["columns", "across"],
              ["rows", "down"],
              ["off", "folded"],
            ],
            state.place[a],
            (v) => {
              state.place[a] = v;
              fill();
              content.querySelector(`select[data-axis="${a}"]`).focus();
            },
            {"data-axis": a},
          ),
        ),
      ),
      h(
        "p",
        {class: "note"},
        h("b", {}, R.text(metric.title, 60)),
        metric.doc ? [": ", R.text(metric.doc, 300)] : null,
      ),
      values.length
        ? R.gridChart(
            columns.map(named(xs)),
            lines.map(named(ys)),
            cells,
            `${metric.title} of ${R.plural(rows.length, "rank")}: ${R.inUnit(low, metric.unit)} to ${R.inUnit(high, metric.unit)}, the largest on rank ${rows.find((r) => Number(r[metric.key]) === high && R.known(r[metric.key])).rank}`,
          )
        : h("p", {class: "empty"}, `${R.short(metric.title, 60)} is not known of any rank.`),
      values.length
        ? h(
            "p",
            {class: "scale"},
            h("span", {}, R.inUnit(low, metric.unit)),
            h("i", {class: "ramp", "aria-hidden": "true"}),
            h("span", {}, R.inUnit(high, metric.unit)),
            missing ? h("span", {class: "muted"}, `?: unknown of ${R.plural(missing, "rank")}`) : null,
          )
        : null,
      R.folded("Every rank as a table", table),
    );
    R.drawAll();
  }
  const s = section(
    "ranks",
    "Ranks",
    axes.length
      ? "Every rank by its coordinates, coloured by one figure. Shown first is the time in which ranks differ most. Choose which axes run across and which down; a folded axis shows the largest of its ranks."
      : "Every rank, coloured by one figure.",
    content,
  );
  s.fill = fill;
  return s;
};

// -- skew -------------------------------------------------------------------------------------------------------------

R.skew = function () {
  const rows = doc.skew || [];
  if (!rows.length)
    return section(
      "skew",
      "Skew and stragglers",
      null,
      nothing("skew", "No call was matched over two or more recorded ranks, so who came late is not known."),
    );
  const content = h("div");
  const roles = [...new Set(rows.map((r) => r.role))];
  const slow = rows.filter((r) => r.slow);
  const perCall = (r) => Number(r.own_late_ns || 0) / (r.calls || 1);
  let role = (slow[0] || rows.slice().sort((a, b) => perCall(b) - perCall(a))[0]).role;
  function fill() {
    const of = rows.filter((r) => r.role === role).sort((a, b) => perCall(b) - perCall(a));
    const few = of.slice(0, 16);
    R.put(
      content,
      h(
        "div",
        {class: "controls"},
        roles.length > 1
          ? choice(
              "Role",
              roles.map((r, i) => [i, R.roleName(r)]),
              roles.indexOf(role),
              (v) => {
                role = roles[Number(v)];
                fill();
                content.querySelector("select").focus();
              },
            )
          : null,
        h(
          "ul",
          {class: "legend inline"},
          h("li", {}, h("i", {class: "swatch", "data-axis": "launch-starved"}), "own"),
          h("li", {}, h("i", {class: "swatch waiting", "data-axis": "idle-strong"}), "inherited from an earlier call"),
          h("li", {}, "├┤ what the clocks leave open in a call"),
          h("li", {}, "● stands out"),
        ),
      ),
      R.skewChart(
        few,
        `Lateness in calls of ${R.roleName(role)}: ${few
          .slice(0, 5)
          .map((r) => `rank ${r.rank} own ${R.time(Math.round(perCall(r)))} a call`)
          .join("; ")}`,
      ),
      of.length > few.length
        ? h("p", {class: "status"}, `The ${few.length} ranks of most own lateness, of ${R.count(of.length)}.`)
        : null,
      R.folded(
        "All as a table",
        () => R.table(R.columnsOf(rows), rows, {caption: "Skew of every rank and role, summed over the recorded steps"}).element,
      ),
    );
    R.drawAll();
  }
  const sentences = [...new Set(slow.map((r) => r.finding).filter(R.known))];
  const s = section(
    "skew",
    "Skew and stragglers",
    "How much later than the first rank each came to a call, the mean over its calls. Own lateness arose on the rank; inherited it brought along from an earlier call. Less than the clocks leave open in a call is not claimed.",
    [
      sentences.length
        ? h(
            "ul",
            {class: "notes"},
            sentences.slice(0, 8).map((x) => h("li", {}, R.text(x, 300))),
          )
        : h("p", {class: "note"}, "No rank stands out."),
      content,
    ],
  );
  s.fill = fill;
  return s;
};

// -- experts ----------------------------------------------------------------------------------------------------------

R.experts = function () {
  const rows = doc.experts || [];
  if (!rows.length)
    return section(
      "experts",
      "MoE balance",
      null,
      nothing(
        "experts",
        "No all-to-all with split sizes was recorded, so the rows that experts receive are not known; the job may have no experts.",
      ),
    );
  const content = h("div");
  const batches = [...new Set(rows.map((r) => r.microbatch))].filter(R.known).sort((a, b) => a - b);
  let batch = "all";
  function fill() {
    const of = rows.filter((r) => batch === "all" || String(r.microbatch) === batch);
    const layerOf = (r) =>
      R.known(r.layer) ? `layer ${r.layer}` : R.known(r.turn) ? `all-to-all ${r.turn}` : "layer unknown";
    const order = (a, b) => a.localeCompare(b, "en", {numeric: true});
    const layers = [...new Set(of.map(layerOf))].sort(order);
    const ranks = [...new Set(of.map((r) => r.rank))].sort((a, b) => a - b);
    const sums = new Map();
    for (const r of of) {
      const key = `${ranks.indexOf(r.rank)}|${layers.indexOf(layerOf(r))}`;
      const s = sums.get(key) || {received: 0, mean: 0, known: true};
      const [received, mean] = [r.rows_received ?? r.received_rows, r.mean ?? r.mean_rows];
      if (R.known(received) && R.known(mean)) {
        s.received += Number(received);
        s.mean += Number(mean);
      } else s.known = false;
      sums.set(key, s);
    }
    const cells = [...sums].map(([key, s]) => {
      const [x, y] = key.split("|").map(Number);
      const value = s.known && s.mean > 0 ? s.received / s.mean : null;
      return {
        x,
        y,
        value,
        shown: R.known(value) ? value.toFixed(2) : "?",
        colour: () => R.ramp(value / 2, "balance"),
        tip: [
          `${layers[y]}, expert rank ${ranks[x]}`,
          [
            ["rows received", R.known(value) ? R.count(s.received) : "unknown"],
            ["if balanced", R.known(value) ? R.number(s.mean) : "unknown"],
            ["times the mean", R.known(value) ? value.toFixed(3) : "unknown"],
          ],
        ],
      };
    });
    const worst = cells.filter((c) => R.known(c.value)).sort((a, b) => b.value - a.value)[0];
    R.put(
      content,
      batches.length > 1
        ? h(
            "div",
            {class: "controls"},
            choice("Micro-batch", [["all", "all, summed"], ...batches.map((b) => [b, String(b)])], batch, (v) => {
              batch = v;
              fill();
              content.querySelector("select").focus();
            }),
          )
        : null,
      worst
        ? h(
            "p",
            {class: "note"},
            `Most uneven: ${layers[worst.y]}, rank ${ranks[worst.x]} receives ${worst.value.toFixed(2)} times the mean.`,
          )
        : null,
      R.gridChart(
        ranks.map((r) => `rank ${r}`),
        layers,
        cells,
        `Rows received per expert rank over the mean${worst ? `, at most ${worst.value.toFixed(2)} on rank ${ranks[worst.x]}, ${layers[worst.y]}` : ""}`,
      ),
      h(
        "p",
        {class: "scale"},
        h("span", {}, "none"),
        h("i", {class: "ramp balance", "aria-hidden": "true"}),
        h("span", {}, "2 times the mean or more; 1 is even"),
      ),
      R.folded(
        "All as a table",
        () =>
          R.table(
            [
              ...R.columnsOf(rows, ["max_over_mean", "evidence"]),
              {key: "max_over_mean", title: "times the mean", align: "r", cell: (r) => R.number(r.max_over_mean)},
              {key: "evidence", title: "of", cell: (r) => R.text(r.evidence, 40)},
            ],
            rows,
            {caption: "Rows received per layer, micro-batch and expert rank, summed over steps and exchanges"},
          ).element,
      ),
    );
    R.drawAll();
  }
  const s = section(
    "experts",
    "MoE balance",
    "Rows that each expert rank receives, over the mean of its group, layer by layer; summed over the recorded steps and exchanges (where probabilities travel apart from their tokens, both count).",
    content,
  );
  s.fill = fill;
  return s;
};

// -- bandwidth --------------------------------------------------------------------------------------------------------

R.bandwidth = function () {
  const rows = doc.bandwidth || [];
  const peers = doc.peers || [];
  const drawn = rows.filter((r) => R.known(r.bus_gb_per_s) && Number(r.payload_bytes) > 0);
  if (!rows.length)
    return section(
      "bandwidth",
      "Bandwidth",
      null,
      nothing(
        "bandwidth",
        "No call was recorded with its time on all its ranks, so transfer cannot be told from waiting.",
      ),
    );
  const axes = [...R.axes, "other", "unknown"].filter((a) => drawn.some((r) => R.axisOf(r.role) === a));
  const points = drawn.map(
    (r) => `${R.roleName(r.role)} ${r.op} ${R.bytes(r.payload_bytes)} ${R.number(r.bus_gb_per_s)} GB/s`,
  );
  return section(
    "bandwidth",
    "Bandwidth",
    "Bus bandwidth against the payload of one call, waiting left out; the line through a point reaches from the slowest call to the fastest. Hollow: between hosts. A short bar: what the link allows, by the bandwidths given.",
    [
      drawn.length
        ? [
            h(
              "ul",
              {class: "legend inline"},
              axes.map((a) =>
                h(
                  "li",
                  {},
                  h("span", {class: "symbol", "data-axis": a.toLowerCase(), "aria-hidden": "true"}, R.symbols[a]),
                  a,
                ),
              ),
            ),
            R.bandwidthChart(drawn, `Bus bandwidth by payload: ${points.slice(0, 12).join("; ")}`),
          ]
        : h("p", {class: "empty"}, "The payload of these calls is not known."),
      drawn.length < rows.length && drawn.length
        ? h(
            "p",
            {class: "status"},
            `${R.plural(rows.length - drawn.length, "row")} of unknown or empty payload stand in the table only.`,
          )
        : null,
      R.folded(
        "All as a table",
        () =>
          R.table([{key: "role", title: "role", cell: (r) => axisTag(r.role)}, ...R.columnsOf(rows, ["role"])], rows, {
            caption: "Query collective_bandwidth",
          }).element,
      ),
      peers.length
        ? R.folded(
            "By peers: the slowest groups and pairs of ranks of each kind of call",
            () =>
              R.table(
                [
                  {key: "role", title: "role", cell: (r) => axisTag(r.role)},
                  {key: "peers", title: "peers", value: (r) => r.peers, cell: (r) => R.text(r.peers, 60)},
                  ...R.columnsOf(peers, ["role", "peers"]),
                ],
                peers,
                {caption: "Query slow_groups: median transfer of a group or pair, and what is usual for its kind"},
              ).element,
          )
        : null,
    ],
  );
};

// -- memory -----------------------------------------------------------------------------------------------------------

R.memory = function () {
  const rows = doc.memory || [];
  if (!rows.length)
    return section(
      "memory",
      "Memory",
      null,
      nothing("memory", "No memory was recorded, and no job is known to expect it from."),
    );
  const staged = rows.some((r) => R.known(r.stage)) && new Set(rows.map((r) => r.rank)).size > 16;
  const nameOf = (r) =>
    staged
      ? `stage ${r.stage}`
      : R.known(r.rank)
        ? `rank ${r.rank}`
        : R.known(r.stage)
          ? `stage ${r.stage}`
          : "every rank";
  const places = new Map();
  for (const r of rows) {
    const name = nameOf(r);
    if (!places.has(name)) places.set(name, {name, expected: new Map(), measured: new Map()});
    for (const side of ["expected", "measured"]) {
      const value = r[`${side}_bytes`];
      if (R.known(value))
        places.get(name)[side].set(r.what, Math.max(Number(value), places.get(name)[side].get(r.what) || 0));
    }
  }
  const list = [...places.values()].sort((a, b) => a.name.localeCompare(b.name, "en", {numeric: true}));
  const whats = [...new Set(rows.map((r) => r.what))];
  const colour = {parameters: 1, gradients: 2, optimizer: 3, activations: 4};
  const measured = rows.some((r) => R.known(r.measured_bytes));
  const expected = rows.some((r) => R.known(r.expected_bytes));
  return section(
    "memory",
    "Memory",
    `Expected (striped) above measured (solid)${staged ? ", of each stage the rank with most" : ""}.${measured ? "" : " Nothing measured was recorded."}${expected ? "" : ` ${R.short((doc.empty || {}).memory || "No job is known to expect it from.", 400)}`}`,
    [
      h(
        "ul",
        {class: "legend inline"},
        whats.map((w) =>
          h(
            "li",
            {},
            w === "peak"
              ? h("b", {"aria-hidden": "true"}, "❙")
              : h("i", {class: `swatch mem-${colour[w] || 5}`, "aria-hidden": "true"}),
            R.text(w, 30),
          ),
        ),
      ),
      R.memoryChart(
        list.slice(0, 24),
        `Memory: ${list
          .slice(0, 6)
          .map(
            (p) =>
              `${p.name} ${whats.map((w) => `${w} expected ${R.bytes(p.expected.get(w))} measured ${R.bytes(p.measured.get(w))}`).join(", ")}`,
          )
          .join("; ")}`,
      ),
      list.length > 24 ? h("p", {class: "status"}, `The first 24 of ${R.count(list.length)}.`) : null,
      R.folded(
        "All as a table",
        () => R.table(R.columnsOf(rows), rows, {caption: "Memory expected and measured"}).element,
      ),
    ],
  );
};

// -- issues, history, appendix ----------------------------------------------------------------------------------------

const SEVERITY = {error: 0, data_loss: 1, warning: 2, info: 3};

R.issues = function () {
  const rows = doc.issues || [];
  if (!rows.length)
    return section("issues", "Input", null, nothing("issues", "The input raised no issue: every row was kept."));
  const count = rows.some((r) => "occurrences" in r) ? "occurrences" : "count";
  const where = (r) =>
    R.known(r.where)
      ? r.where
      : R.known(r.location)
        ? r.location
        : (r.ranks || []).length
          ? `rank${r.ranks.length === 1 ? "" : "s"} ${R.ranges(r.ranks)}`
          : (r.files || []).length
            ? r.files.join(", ")
            : R.known(r.rank)
              ? `rank ${r.rank}`
              : r.source_file;
  return section(
    "issues",
    "Input",
    "What was wrong or missing in the files, and what was done about it.",
    R.table(
      [
        {
          key: "severity",
          title: "severity",
          value: (r) => SEVERITY[r.severity] ?? 9,
          cell: (r) =>
            h(
              "span",
              {class: `severity sev-${r.severity in SEVERITY ? r.severity : "info"}`},
              R.short(r.severity || "unknown", 20).replace("_", " "),
            ),
        },
        {key: "code", title: "code", cell: (r) => h("code", {}, R.short(r.code || "", 60))},
        {key: "sentence", title: "issue", wide: true, cell: (r) => R.text(r.sentence, 300)},
        {key: count, title: "times", align: "r", cell: (r) => (R.known(r[count]) ? R.count(r[count]) : R.exact(null))},
        {key: "where", title: "where", value: where, cell: (r) => (R.known(where(r)) ? R.text(where(r), 60) : "")},
      ],
      rows,
      {caption: "Issues of the input", noun: "issue"},
    ).element,
  );
};

R.history = function () {
  const rows = doc.history || [];
  if (!rows.some((r) => R.known(r.step_ns)))
    return section(
      "history",
      "Step-time history",
      null,
      nothing(
        "history",
        "No log with Megatron's iteration lines was given: the profiled steps stand alone, and what the profiler cost is not known.",
      ),
    );
  const [on, off] = [
    R.median(rows.filter((r) => r.profiled).map((r) => r.step_ns)),
    R.median(rows.filter((r) => !r.profiled).map((r) => r.step_ns)),
  ];
  const n = (p) => rows.filter((r) => !!r.profiled === p && R.known(r.step_ns)).length;
  const cost =
    R.known(on) && R.known(off)
      ? `Profiled iterations (those whose number a recorded step has) took ${R.time(on)} (median of ${n(true)}), the others ${R.time(off)} (median of ${n(false)}): ${on >= off ? "+" : "−"}${R.percent(Math.abs(on - off) / off)}, the profiler's cost if nothing else differs.`
      : "Profiled and other iterations are not both in the log, so what the profiler cost is not known.";
  return section("history", "Step-time history", cost, [
    h(
      "ul",
      {class: "legend inline"},
      h("li", {}, h("span", {class: "symbol", "data-axis": "dp", "aria-hidden": "true"}, "◆"), "profiled"),
      h(
        "li",
        {},
        h("span", {class: "symbol", "data-axis": "compute", "aria-hidden": "true"}, "—"),
        "every iteration of the log",
      ),
    ),
    R.historyChart(rows, `Step time of ${R.plural(rows.length, "iteration")}. ${cost}`),
    R.folded("All as a table", () => R.table(R.columnsOf(rows), rows, {caption: "Iterations of the log"}).element),
  ]);
};

R.appendix = function () {
  const a = doc.appendix || {};
  const pairs = (map) =>
    h(
      "dl",
      {class: "facts-list"},
      Object.entries(map)
        .filter(([, v]) => R.known(v))
        .map(([k, v]) =>
          h(
            "div",
            {},
            h("dt", {}, R.text(k, 60)),
            h("dd", {}, typeof v === "object" ? R.text(R.json(v), 300) : R.text(v, 300)),
          ),
        ),
    );
  return section("appendix", "Appendix", null, [
    (a.definitions || []).length
      ? R.folded("Definitions", () =>
          h(
            "dl",
            {class: "definitions"},
            a.definitions.map((d) => [h("dt", {}, R.text(d.term, 80)), h("dd", {}, R.text(d.text, 1200))]),
          ),
        )
      : null,
    a.job ? R.folded("Job", () => pairs(a.job)) : h("p", {class: "empty"}, "No job is known."),
    R.folded("Run and versions", () =>
      pairs({
        ...(doc.run || {}),
        ranks_recorded: Array.isArray((doc.run || {}).ranks_recorded)
          ? R.ranges(doc.run.ranks_recorded)
          : (doc.run || {}).ranks_recorded,
        steps: R.ranges((doc.run || {}).steps || []),
        ...(a.versions || {}),
      }),
    ),
    (a.queries || []).length
      ? R.folded(`SQL of the figures: ${R.plural(a.queries.length, "query", "queries")}`, () =>
          h(
            "div",
            {},
            a.queries.map((q) =>
              R.folded(R.short(q.name, 60), () =>
                h(
                  "div",
                  {},
                  sql(q),
                  Object.keys(q.parameters || {}).length
                    ? h("p", {class: "muted"}, `Parameters: ${R.short(R.json(q.parameters), 300)}`)
                    : null,
                ),
              ),
            ),
          ),
        )
      : null,
    (doc.left_out || []).length
      ? h(
          "ul",
          {class: "notes"},
          doc.left_out.map((l) => h("li", {}, leftOut(l))),
        )
      : null,
  ]);
};
