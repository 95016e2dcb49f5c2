// What everything else rests on: the document, words for numbers, and elements built from text. Nothing here or
// elsewhere turns text into markup: names come from traces.
"use strict";

const R = {}; // the page's own names, one object

// -- the document -----------------------------------------------------------------------------------------------------

/** The value that html.py packed (see _packed there). */
R.unpack = function unpack(value) {
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) return value.map(unpack);
  if ("$int" in value) return BigInt(value.$int);
  if ("$map" in value) return unpackMap(value.$map);
  if ("$words" in value) return value.$index.map((i) => value.$words[i]);
  if ("$keys" in value) {
    const columns = value.$columns.map(unpack);
    const rows = [];
    for (let i = 0; i < (columns[0] || []).length; i++) {
      const row = Object.create(null);
      value.$keys.forEach((key, k) => {
        row[key] = columns[k][i];
      });
      rows.push(row);
    }
    return rows;
  }
  return unpackMap(value);
  function unpackMap(map) {
    const out = Object.create(null);
    for (const key of Object.keys(map)) out[key] = unpack(map[key]);
    return out;
  }
};

R.doc = R.unpack(JSON.parse(document.getElementById("data").textContent));
R.roleAxes = JSON.parse(document.getElementById("axes").textContent);

// -- elements ---------------------------------------------------------------------------------------------------------

/** An element: R.h("p", {class: "x"}, "text", child). Texts become text nodes. */
R.h = function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [p, v] of Object.entries(value)) element.style.setProperty(p, v);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== "" && c !== false));
  return element;
};

/** Puts children into an element in place of what it held; what is null or empty is left out. */
R.put = (element, ...children) =>
  element.replaceChildren(...children.flat(3).filter((c) => c !== null && c !== undefined && c !== "" && c !== false));

// -- words for numbers: the same as reports/diff.py and reports/text.py -----------------------------------------------

const known = (value) => value !== null && value !== undefined;
R.known = known;

/** Three digits, as Python's format code .3g gives them below 1000. */
function digits(value) {
  const text = Number(value).toPrecision(3);
  return text.includes("e") ? String(Math.round(value)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
R.digits = digits;

R.time = function (ns) {
  if (!known(ns)) return "unknown";
  let value = Number(ns);
  const sign = value < 0 ? "−" : "";
  value = Math.abs(value);
  for (const unit of ["ns", "µs", "ms"]) {
    if (value < 999.5) return `${sign}${digits(value)} ${unit}`;
    value /= 1000;
  }
  return value < 999.5 ? `${sign}${digits(value)} s` : `${sign}${R.count(Math.round(value))} s`;
};

R.bytes = function (size) {
  if (!known(size)) return "unknown";
  let value = Number(size);
  if (value < 1024) return `${Number.isInteger(value) ? value : value.toFixed(1)} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    value /= 1024;
    if (value < 999.5) return `${digits(value)} ${unit}`;
  }
  return `${digits(value / 1024)} PiB`;
};

/** A whole number with thousands marked. */
R.count = function (value) {
  if (!known(value)) return "unknown";
  if (typeof value === "number" && !Number.isInteger(value)) return R.number(value);
  return String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
};

R.number = function (value) {
  if (!known(value)) return "unknown";
  if (typeof value === "bigint" || Number.isInteger(value)) return R.count(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e12)) return value.toExponential(2);
  return size >= 1000 ? R.count(Math.round(value)) : digits(value);
};

/** A share in percent, rounded down to a tenth, so that 100 % means all and 0 % nothing. */
R.percent = function (value) {
  if (!known(value)) return "unknown";
  const tenths = Math.floor(Number(value) * 1000 + 1e-9);
  if (tenths === 0 && Number(value) > 0) return "< 0.1 %";
  return `${tenths % 10 ? (tenths / 10).toFixed(1) : tenths / 10} %`;
};

/** A value in the unit that a metric names. */
R.inUnit = function (value, unit) {
  if (!known(value)) return "unknown";
  if (typeof value === "string" || typeof value === "boolean") return String(value);
  if (unit === "ns") return typeof value === "bigint" ? `${R.count(value)} ns` : R.time(value);
  if (unit === "bytes" || unit === "B") return R.bytes(value);
  if (unit === "1" || unit === "share" || unit === "%") return R.percent(unit === "%" ? value / 100 : value);
  return `${R.number(value)}${unit ? ` ${unit}` : ""}`;
};

/** The unit that a column's name ends in, as the run table and the queries name them. */
R.unitOf = function (key) {
  if (/_ns$|^ns$/.test(key)) return "ns";
  if (/_bytes(_|$)/.test(key)) return "bytes";
  return "";
};

/** Whole numbers as ranges: 0-3, 7. */
R.ranges = function (numbers) {
  if (!Array.isArray(numbers)) return known(numbers) ? String(numbers) : "";
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (const n of sorted) {
    const last = parts[parts.length - 1];
    if (last && n === last[1] + 1) last[1] = n;
    else parts.push([n, n]);
  }
  return parts.map(([low, high]) => (low === high ? `${low}` : `${low}-${high}`)).join(", ");
};

R.plural = (n, noun, plural) => `${R.count(n)} ${n === 1 ? noun : plural || `${noun}s`}`;

/** Text in one line without control characters, its middle left out where it is long. */
R.short = function (text, longest = 120) {
  const clean = String(text).replace(/[\s\u0000-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, " ");
  if (clean.length <= longest) return clean;
  const half = Math.floor((longest - 3) / 2);
  return `${clean.slice(0, half)} … ${clean.slice(-half)}`;
};

/** A text as one argument of a POSIX shell: what is copied from the page runs nothing that a name brings along. */
R.shell = function (text) {
  const clean = R.short(text, 200);
  return /^[\w@%+=:,./-]+$/.test(clean) ? clean : `'${clean.replace(/'/g, "'\\''")}'`;
};

/** A recorded text as an element; where it is shortened, the whole is one click (or key) away. */
R.text = function (text, longest = 120) {
  if (!known(text)) return R.h("span", {class: "unknown"}, "unknown");
  const shown = R.short(text, longest);
  if (String(text).length <= longest) return R.h("span", {class: "name"}, shown);
  return R.h(
    "details",
    {class: "long"},
    R.h("summary", {title: String(text)}, shown),
    R.h("div", {class: "whole"}, String(text)),
  );
};

/** A number with its unit; the exact one in the title. */
R.exact = function (value, unit) {
  if (!known(value)) return R.h("span", {class: "unknown"}, "unknown");
  const shown = R.inUnit(value, unit);
  const whole = unit === "ns" || unit === "bytes" ? `${R.count(value)} ${unit}` : null;
  return R.h("span", {class: "number", title: whole}, shown);
};

/** How many ranks: of a list or of their number. */
R.howMany = (ranks) => (Array.isArray(ranks) ? ranks.length : ranks);

R.sum = (values) => values.reduce((a, b) => a + Number(b || 0), 0);

/** Lower median of the known values: a value that occurred. */
R.median = function (values) {
  const sorted = values
    .filter(known)
    .map(Number)
    .sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
};

// -- axes and classes: one colour and one pattern each ----------------------------------------------------------------

const AXES = ["TP", "CP", "EP", "PP", "DP"];
R.axes = AXES;

/** TP, CP, EP, PP, DP or other; unknown of no role. */
R.axisOf = function (role) {
  if (!known(role) || role === "unknown") return "unknown";
  if (String(role).includes(" + ")) {
    // several at once
    const axes = new Set(String(role).split(" + ").map(R.axisOf));
    return axes.size === 1 ? [...axes][0] : "other";
  }
  const found =
    R.roleAxes[String(role).toLowerCase()] || (AXES.includes(String(role).toUpperCase()) && String(role).toUpperCase());
  return AXES.includes(found) ? found : "other";
};

/** Role as people write it: its axis in capitals where they are the same. */
R.roleName = (role) =>
  !known(role)
    ? "unknown"
    : String(role).includes(" + ")
      ? String(role).split(" + ").map(R.roleName).join(" + ")
      : AXES.includes(String(role).toUpperCase())
        ? String(role).toUpperCase()
        : R.short(role, 24);

R.swatch = (name, part) => R.h("i", {class: `swatch ${part || ""}`, "data-axis": name, "aria-hidden": "true"});

/** Colour of the theme in force. */
R.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
