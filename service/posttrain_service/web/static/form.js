// Inputs from a JSON schema: what the contract describes is what is asked for. An input left empty is left out of the request.

import { fill, h } from './dom.js';

let count = 0;

export class Schemas {
  constructor(described) { this.all = described.components.schemas; }
  of(schema) {
    if (!schema.$ref) return schema;
    const { $ref, ...beside } = schema;
    return { ...this.all[$ref.split('/').pop()], ...beside };
  }
}

const NAMES = { adapter: 'LoRA adapter' };
const human = (name) => NAMES[name] ?? name.replaceAll('_', ' ');
const shown = (value) => (typeof value === 'string' ? value : JSON.stringify(value));

// A field of the schema: `element`, `get()` (undefined = left out), `set(value)`, `path`, and `at(path)` for errors.
export function field(schemas, name, given, path, skip = new Set()) {
  const schema = schemas.of(given);
  const options = (schema.anyOf ?? []).map((one) => schemas.of(one));
  const real = options.filter((one) => one.type !== 'null');
  const nullable = real.length < options.length;
  const one = real.length === 1 ? { ...real[0], description: schema.description ?? real[0].description, default: schema.default } : schema;
  if (one.oneOf && one.discriminator) return kindField(schemas, name, one, path, skip);
  if (one.type === 'object' && one.properties) return nullable ? optionalGroup(schemas, name, one, path, skip) : group(schemas, name, one, path, skip);
  if (one.type === 'boolean') return select(name, one, path, [['true', true], ['false', false]]);
  if (one.enum) return select(name, one, path, one.enum.map((value) => [String(value), value]));
  if ((one.type === 'integer' || one.type === 'number') && real.length <= 1) return input(name, one, path, 'number');
  if (one.type === 'string') return input(name, one, path, 'text');
  return input(name, one, path, 'json');
}

function frame(name, schema, path, control) {
  const id = `f${count += 1}`;
  control.id = id;
  const fault = h('small', { class: 'fault', id: `${id}-fault` });
  control.setAttribute('aria-describedby', `${id}-help ${id}-fault`);
  const element = h('div', { class: 'field', 'data-path': path }, h('label', { for: id }, human(name)), control, h('small', { id: `${id}-help` }, schema.description ?? ''), fault);
  const mark = (message) => { fill(fault, message ?? ''); if (message) control.setAttribute('aria-invalid', 'true'); else control.removeAttribute('aria-invalid'); };
  return { element, path, mark, at: (wanted) => (wanted === path || wanted.startsWith(`${path}.`) ? { element, mark, control } : null) };
}

function select(name, schema, path, choices) {
  const standard = schema.default === undefined ? '' : ` (${shown(schema.default)})`;
  const control = h('select', {}, h('option', { value: '' }, `default${standard}`), choices.map(([text]) => h('option', { value: text }, text)));
  return { ...frame(name, schema, path, control), get: () => choices.find(([text]) => text === control.value)?.[1], set: (value) => { control.value = value === undefined || value === null ? '' : String(value); } };
}

function input(name, schema, path, kind) {
  const standard = schema.default === undefined || schema.default === null ? (kind === 'number' ? 'chosen by the service' : '') : shown(schema.default);
  const list = kind === 'json' && schema.type !== 'object';
  const long = (schema.maxLength ?? 0) > 10000;
  const control = h(long ? 'textarea' : 'input', { type: long ? null : kind === 'number' ? 'number' : 'text', placeholder: standard, min: schema.minimum, max: schema.maximum, step: kind === 'number' ? (schema.type === 'integer' ? 1 : 'any') : null, autocomplete: 'off', spellcheck: 'false' });
  const made = frame(name, schema, path, control);
  const get = () => {
    const text = control.value.trim();
    if (text === '') return undefined;
    if (kind === 'text') return control.value;
    if (kind === 'number') return Number(text);
    try { return JSON.parse(text); } catch { return list && !/^[[{"]/.test(text) ? (text.includes(',') ? text.split(',').map((part) => part.trim()).filter(Boolean) : text) : text; }
  };
  return { ...made, get, set: (value) => { control.value = value === undefined || value === null ? '' : kind === 'json' ? shown(value) : String(value); } };
}

function fields(schemas, schema, path, skip) {
  return Object.entries(schema.properties).filter(([name]) => !skip.has(path ? `${path}.${name}` : name) && name !== 'kind')
    .map(([name, child]) => field(schemas, name, child, path ? `${path}.${name}` : name, skip));
}

function together(parts) {
  const name = (part) => part.path.split('.').pop();
  return {
    get: () => { const pairs = parts.map((part) => [name(part), part.get()]).filter(([, value]) => value !== undefined); return pairs.length ? Object.fromEntries(pairs) : undefined; },
    set: (value) => parts.forEach((part) => part.set(value?.[name(part)])),
    at: (wanted) => { for (const part of parts) { const found = part.at(wanted); if (found) return found; } return null; },
  };
}

export function group(schemas, name, schema, path, skip) {
  const parts = fields(schemas, schema, path, skip);
  const element = h('fieldset', { 'data-path': path }, name && h('legend', {}, human(name)), schema.description && h('p', { class: 'about' }, schema.description), h('div', { class: 'fields' }, parts.map((part) => part.element)));
  return { element, path, parts, ...together(parts) };
}

function optionalGroup(schemas, name, schema, path, skip) {
  const inner = group(schemas, null, schema, path, skip);
  const kind = schema.properties.kind?.const;
  const box = h('input', { type: 'checkbox', onchange: draw });
  const element = h('fieldset', { 'data-path': path }, h('legend', {}, h('label', { class: 'inline' }, box, human(name))), schema.description && h('p', { class: 'about' }, schema.description), inner.element);
  inner.element.classList.add('bare');
  inner.element.querySelector('.about')?.remove();
  function draw() { inner.element.classList.toggle('hidden', !box.checked); }
  draw();
  return { element, path, get: () => (box.checked ? { ...(kind ? { kind } : {}), ...inner.get() } : undefined),
    set: (value) => { box.checked = value !== undefined && value !== null; inner.set(value ?? undefined); draw(); },
    at: (wanted) => inner.at(wanted) ?? (wanted === path ? { element, control: box, mark: () => {} } : null) };
}

function kindField(schemas, name, schema, path, skip) {
  const choices = Object.entries(schema.discriminator.mapping).map(([kind, $ref]) => [kind, schemas.of({ $ref })]);
  const standard = schema.default?.kind ?? choices[0][0];
  const groups = Object.fromEntries(choices.map(([kind, one]) => [kind, group(schemas, null, one, path, skip)]));
  const place = h('div', { class: 'kinds' });
  const control = h('select', { onchange: draw }, choices.map(([kind]) => h('option', { selected: kind === standard }, kind)));
  const made = frame(name, schema, path, control);
  const element = h('div', { class: 'wide' }, made.element, place);
  function draw() { const chosen = groups[control.value]; chosen.element.classList.add('bare'); fill(place, chosen.parts.length || chosen.element.querySelector('.about') ? chosen.element : null); element.dispatchEvent(new Event('input', { bubbles: true })); }
  draw();
  return { element, path, get: () => { const inner = groups[control.value].get(); return control.value === standard && !inner ? undefined : { kind: control.value, ...inner }; },
    set: (value) => { control.value = value?.kind ?? standard; groups[control.value].set(value ?? undefined); draw(); },
    at: (wanted) => groups[control.value].at(wanted) ?? made.at(wanted) };
}
