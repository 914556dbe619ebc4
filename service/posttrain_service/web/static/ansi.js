// A line of terminal output as a terminal would leave it: carriage returns overwrite, SGR codes colour, all else is dropped.

const CODE = /\x1b\[([0-9;:]*)([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b]*(?:\x1b\\)?|\x1b[ -/]*[0-~]|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]/g;
const LONGEST = 20000;

export const plain = () => ({ fg: null, bg: null, bold: false, dim: false, italic: false, underline: false, inverse: false });

// Pieces of one line (without its \n) as [text, style]; `style` holds on to the next line and is changed.
export function line(raw, style) {
  const parts = (raw.endsWith('\r') ? raw.slice(0, -1) : raw).split('\r');
  let shown = [];
  for (const part of parts) {
    const pieces = styled(part, style);
    if (pieces.some(([text]) => text !== '')) shown = pieces;
  }
  return shown;
}

function styled(text, style) {
  const pieces = [];
  let from = 0;
  const cut = text.length > LONGEST;
  const held = cut ? text.slice(0, LONGEST) : text;
  for (const match of held.matchAll(CODE)) {
    if (match.index > from) pieces.push([held.slice(from, match.index), { ...style }]);
    if (match[2] === 'm') sgr(match[1], style);
    from = match.index + match[0].length;
  }
  if (from < held.length) pieces.push([held.slice(from), { ...style }]);
  if (cut) pieces.push([` … ${text.length - LONGEST} more characters`, { ...plain(), dim: true }]);
  return pieces;
}

function sgr(codes, style) {
  const numbers = codes === '' ? [0] : codes.split(/[;:]/).map(Number);
  for (let at = 0; at < numbers.length; at += 1) {
    const code = numbers[at];
    if (code === 0) Object.assign(style, plain());
    else if (code === 1) style.bold = true;
    else if (code === 2) style.dim = true;
    else if (code === 3) style.italic = true;
    else if (code === 4) style.underline = true;
    else if (code === 7) style.inverse = true;
    else if (code === 22) Object.assign(style, { bold: false, dim: false });
    else if (code === 23) style.italic = false;
    else if (code === 24) style.underline = false;
    else if (code === 27) style.inverse = false;
    else if (code === 38 || code === 48) {
      const [colour, used] = extended(numbers, at + 1);
      style[code === 38 ? 'fg' : 'bg'] = colour;
      at += used;
    } else if (code === 39) style.fg = null;
    else if (code === 49) style.bg = null;
    else if (code >= 30 && code <= 37) style.fg = code - 30;
    else if (code >= 40 && code <= 47) style.bg = code - 40;
    else if (code >= 90 && code <= 97) style.fg = code - 82;
    else if (code >= 100 && code <= 107) style.bg = code - 92;
  }
}

function extended(numbers, at) {
  if (numbers[at] === 5) {
    const n = numbers[at + 1] ?? 0;
    if (n < 16) return [n, 2];
    if (n >= 232) return [rgb(8 + 10 * (n - 232), 8 + 10 * (n - 232), 8 + 10 * (n - 232)), 2];
    const step = (value) => (value ? 55 + 40 * value : 0);
    return [rgb(step(Math.floor((n - 16) / 36)), step(Math.floor((n - 16) / 6) % 6), step((n - 16) % 6)), 2];
  }
  if (numbers[at] === 2) return [rgb(numbers[at + 1], numbers[at + 2], numbers[at + 3]), 4];
  return [null, 0];
}

const rgb = (...parts) => `rgb(${parts.map((part) => Math.max(0, Math.min(255, Number(part) || 0))).join(',')})`;

// The pieces as a row of text nodes and spans.
export function row(pieces) {
  const element = document.createElement('div');
  for (const [text, style] of pieces) {
    const classes = ['bold', 'dim', 'italic', 'underline', 'inverse'].filter((name) => style[name]).map((name) => `a-${name}`);
    if (typeof style.fg === 'number') classes.push(`a-f${style.fg}`);
    if (typeof style.bg === 'number') classes.push(`a-b${style.bg}`);
    if (!classes.length && typeof style.fg !== 'string' && typeof style.bg !== 'string') { element.append(text); continue; }
    const span = document.createElement('span');
    span.className = classes.join(' ');
    if (typeof style.fg === 'string') span.style.color = style.fg;
    if (typeof style.bg === 'string') span.style.background = style.bg;
    span.append(text);
    element.append(span);
  }
  return element;
}
