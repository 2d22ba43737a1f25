// Numbers as people read them. No document, no clock: the tests call these directly.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(number) {
  if (!Number.isFinite(number)) return "–";
  if (number >= 1e6) return `${short(number / 1e6)}M`;
  if (number >= 1e4) return `${short(number / 1e3)}k`;
  return Number.isInteger(number) || number >= 10 ? GROUPED.format(number) : short(number);
}

function short(number) {
  return number >= 100 ? number.toFixed(0) : number.toFixed(1).replace(/\.0$/, "");
}

export function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "–";
  if (seconds === 0) return "0";
  if (seconds < 0.9995e-3) return `${short(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${short(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${short(seconds)} s`;
  return long(Math.round(seconds));
}

function long(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  return units
    .slice(first, first + 2)
    .map(([unit, size], place) => [unit, place === 0 ? Math.floor(seconds / size) : Math.floor((seconds % units[first][1]) / size)])
    .filter(([, whole], place) => place === 0 || whole > 0)
    .map(([unit, whole]) => `${whole} ${unit}`)
    .join(" ");
}

export function bytes(number) {
  if (!Number.isFinite(number)) return "–";
  const power = number < 1024 ? 0 : Math.min(Math.floor(Math.log2(number) / 10), 4);
  return `${short(number / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return share > 0 && share < 0.1 ? "<0.1 %" : `${short(share)} %`;
}

// The steps of an axis from 0 to at least `most`, which is above 0: 1, 2 or 5 times a power of ten, about `wanted` of them.
export function steps(most, wanted = 3) {
  const rough = most / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9)) * power;
  const last = Math.ceil(most / size - 1e-9);
  return Array.from({ length: last + 1 }, (_, index) => index * size);
}
