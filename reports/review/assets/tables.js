// Tables: sorted by buttons in their heads, filtered, and written a part at a time where they are long.
"use strict";

const PART = 200; // rows written at once

/** Order of two values of a column; unknown ones come last, whichever way it is sorted. */
R.compare = function (a, b, down) {
  const none = (v) => !R.known(v) || (typeof v === "number" && Number.isNaN(v));
  if (none(a) || none(b)) return none(a) - none(b);
  let order;
  if (typeof a === "string" || typeof b === "string") order = String(a).localeCompare(String(b), "en", {numeric: true});
  else order = a < b ? -1 : a > b ? 1 : 0;
  return down ? -order : order;
};

/**
 * A table element in a region that scrolls sideways.
 * columns: {key, title, unit, align: "r"|"l", value(row): what is sorted, cell(row): node or text, wide}.
 * options: caption (read aloud), detail(row): node shown below an opened row, or null; filters: element above it;
 * keep(row): whether a row is shown; noun; part: rows written at once.
 * Gives {element, update()}: update() applies the filters again.
 */
R.table = function (columns, rows, options = {}) {
  const detail = options.detail;
  let sorted = {column: null, down: false};
  const part = options.part || PART;
  let written = part;
  const open = new Set();
  const body = R.h("tbody");
  const heads = columns.map((c) => {
    const mark = R.h("span", {class: "mark", "aria-hidden": "true"});
    const button = R.h("button", {type: "button"}, R.h("span", {}, c.title), mark);
    const head = R.h(
      "th",
      {scope: "col", class: c.align === "r" ? "r" : null, "aria-sort": "none", title: c.doc},
      button,
    );
    button.addEventListener("click", () => {
      const first = c.align === "r"; // numbers: the largest first
      sorted = sorted.column === c ? {column: c, down: !sorted.down} : {column: c, down: first};
      heads.forEach((other) => {
        const here = other === head;
        other.setAttribute("aria-sort", here ? (sorted.down ? "descending" : "ascending") : "none");
        other.querySelector(".mark").textContent = here ? (sorted.down ? "▼" : "▲") : "";
      });
      update();
    });
    return head;
  });
  const table = R.h(
    "table",
    {},
    R.h("caption", {class: "hidden"}, options.caption || ""),
    R.h(
      "thead",
      {},
      R.h("tr", {}, detail ? R.h("th", {class: "opener"}, R.h("span", {class: "hidden"}, "Details")) : null, heads),
    ),
    body,
  );
  const region = R.h(
    "div",
    {class: "scroll", role: "region", tabindex: "0", "aria-label": options.caption || "Table"},
    table,
  );
  const status = R.h("p", {class: "status", "aria-live": "polite"});
  const more = R.h("button", {type: "button", class: "more"});
  more.addEventListener("click", () => {
    written = Infinity;
    update();
  });
  const element = R.h("div", {class: "table"}, options.filters, region, more, status);

  function cells(row) {
    return columns.map((c) => {
      const content = c.cell ? c.cell(row) : R.exact(row[c.key], c.unit);
      return R.h(
        "td",
        {class: [c.align === "r" ? "r" : "", c.wide ? "wide" : "", c.class || ""].join(" ").trim() || null},
        ...[content].flat(3).filter((x) => x !== null && x !== undefined && x !== ""),
      );
    });
  }

  function rowsOf(row) {
    if (!detail) return [R.h("tr", {}, cells(row))];
    const below = R.h("tr", {class: "detail", hidden: !open.has(row)}, R.h("td", {colspan: columns.length + 1}));
    const fill = () => {
      if (!below.firstChild.hasChildNodes()) below.firstChild.append(detail(row));
    };
    if (open.has(row)) fill();
    const button = R.h("button", {
      type: "button",
      class: "open",
      "aria-expanded": open.has(row) ? "true" : "false",
      "aria-label": "Details of this row",
    });
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-expanded") !== "true";
      button.setAttribute("aria-expanded", String(now));
      if (now) {
        open.add(row);
        fill();
      } else open.delete(row);
      below.hidden = !now;
    });
    return [R.h("tr", {"data-verdict": row.verdict || null}, R.h("td", {class: "opener"}, button), cells(row)), below];
  }

  function update() {
    let shown = options.keep ? rows.filter(options.keep) : rows.slice();
    if (sorted.column) {
      const value = sorted.column.value || ((row) => row[sorted.column.key]);
      shown = shown
        .map((row, i) => [value(row), i, row])
        .sort((a, b) => R.compare(a[0], b[0], sorted.down) || a[1] - b[1])
        .map((x) => x[2]);
    }
    body.replaceChildren(...shown.slice(0, written).flatMap(rowsOf));
    more.hidden = shown.length <= written;
    more.textContent = `Show all ${R.plural(shown.length, options.noun || "row")}`;
    status.hidden = !options.keep && rows.length <= part;
    status.textContent =
      (shown.length > written ? `the first ${R.count(written)} of ` : "") +
      (shown.length === rows.length
        ? R.plural(rows.length, options.noun || "row")
        : `${R.count(shown.length)} of ${R.plural(rows.length, options.noun || "row")}`);
  }

  update();
  return {
    element,
    update,
    all() {
      written = Infinity;
      update();
    },
  };
};

/** Columns of rows as a query gives them, in the order of their keys. */
R.columnsOf = function (rows, leaveOut = []) {
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((key) => !leaveOut.includes(key));
  return keys.map((key) => {
    const numeric = rows.every(
      (row) => !R.known(row[key]) || typeof row[key] === "number" || typeof row[key] === "bigint",
    );
    const unit = R.unitOf(key);
    return {
      key,
      title: R.short(unit ? key.replace(/_(ns|bytes)$/, "") : key, 60),
      doc: key,
      align: numeric ? "r" : "l",
      unit,
      cell: (row) => R.anything(row[key], unit),
    };
  });
};

/** Any value of a document as an element. */
R.anything = function (value, unit) {
  if (!R.known(value)) return R.h("span", {class: "unknown"}, "unknown");
  if (Array.isArray(value)) {
    return value.every((v) => typeof v === "number" && Number.isInteger(v) && v >= 0) &&
      value.length > 1 &&
      value.every((v, i) => i === 0 || v > value[i - 1])
      ? R.text(R.ranges(value), 60)
      : R.text(
          value.map((v) => (typeof v === "object" && v !== null ? R.json(v) : String(v))).join(", ") || "none",
          80,
        );
  }
  if (typeof value === "object") return R.text(R.json(value), 80);
  if (typeof value === "string") return R.text(value, 80);
  if (typeof value === "boolean") return R.h("span", {}, value ? "yes" : "no");
  return R.exact(value, unit);
};

R.json = (value) => JSON.stringify(value, (key, v) => (typeof v === "bigint" ? String(v) : v));

/** A table that is made when its summary is opened. */
R.folded = function (title, make, open = false) {
  const box = R.h("details", {class: "fold"}, R.h("summary", {}, title));
  const fill = () => {
    if (box.children.length === 1) box.append(make());
  };
  box.addEventListener("toggle", () => {
    if (box.open) fill();
  });
  box.fill = fill;
  if (open) {
    fill();
    box.open = true;
  }
  return box;
};
