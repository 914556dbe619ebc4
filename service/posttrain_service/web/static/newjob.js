// A new job: the form is made from the service's own description, the data set is looked at before anything starts.

import { button, bytes, copier, duration, fill, h, note, number } from './dom.js';
import { ApiError, get, jobPath, key, post, upload } from './api.js';
import { Schemas, field } from './form.js';
import { curl, python } from './snippets.js';

const COMMON = ['num_epochs', 'effective_batch_size', 'learning_rate', 'max_seq_len', 'warmup_steps', 'lr_scheduler'];
const OWN = ['method', 'lora', 'loggers', 'validation_split', 'save_every_steps', 'save_every_epoch', 'keep_last', 'keep_best', 'best_metric'];
const FIRST = ['name', 'method', 'adapter'];
const SHOWN_ERRORS = 100;

export function newJobView(query) {
  const element = h('section', { 'aria-labelledby': 'title' }, h('div', { class: 'row head' }, h('h1', { id: 'title' }, 'New job')), h('p', { class: 'told' }, 'Reading what the service takes…'));
  return { title: 'New job', element, async start(signal) {
    const [described, models, files] = await Promise.all([get('openapi.json', {}, signal), get('v1/models', { limit: 1000 }, signal), get('v1/files', { purpose: 'fine-tune', limit: 100 }, signal)]);
    const form = new JobForm(new Schemas(described), models.data.filter((one) => one.trainable), files.data, signal);
    fill(element, h('div', { class: 'row head' }, h('h1', { id: 'title' }, 'New job')), form.element);
    if (query.get('model')) form.set({ model: query.get('model') });
    if (query.get('from')) form.like(await get(jobPath(query.get('from')), {}, signal));
    form.changed();
  } };
}

class JobForm {
  constructor(schemas, models, files, signal) {
    this.signal = signal;
    const request = schemas.all.JobRequest.properties;
    const training = schemas.of(request.training).properties;
    const skip = new Set(OWN.map((name) => `training.${name}`));
    const make = (name, schema = request[name], path = name) => field(schemas, name, schema, path, skip);
    this.fields = { ...Object.fromEntries(Object.keys(request).filter((name) => !['model', 'dataset', 'validation_dataset', 'training'].includes(name)).map((name) => [name, make(name)])) };
    this.knobs = Object.fromEntries(Object.keys(training).filter((name) => !OWN.includes(name)).map((name) => [name, make(name, training[name], `training.${name}`)]));
    this.model = modelField(models);
    this.data = new DataField('Training rows', files, () => this.changed(), signal, this);
    this.validation = new DataField('Validation rows (optional)', files, () => this.changed(), signal, null);
    this.side = new Side(this);
    const others = Object.keys(this.fields).filter((name) => !FIRST.includes(name) && name !== 'validation_split');
    const more = h('div', { class: 'fields' }, Object.keys(this.knobs).filter((name) => !COMMON.includes(name)).map((name) => this.knobs[name].element));
    const words = h('input', { type: 'search', placeholder: 'Filter the knobs…', 'aria-label': 'Filter the knobs', oninput: () => { for (const part of more.children) part.classList.toggle('hidden', !part.textContent.toLowerCase().includes(words.value.toLowerCase())); } });
    this.refusal = h('div', { role: 'alert' });
    const form = h('form', { class: 'form', novalidate: true, oninput: () => this.changed(), onsubmit: (event) => { event.preventDefault(); this.submit(); } },
      section('What', [h('div', { class: 'fields' }, this.model.element, this.fields.name.element), this.fields.method.element, this.fields.adapter.element]),
      section('Data', [this.data.element, h('details', {}, h('summary', {}, 'Validation'), this.validation.element, h('div', { class: 'fields' }, this.fields.validation_split.element))]),
      section('Training', [h('div', { class: 'fields' }, COMMON.map((name) => this.knobs[name]?.element)), h('details', {}, h('summary', {}, `All other knobs (${more.childElementCount})`), words, more)]),
      section('More', others.map((name) => h('details', {}, h('summary', {}, name.replaceAll('_', ' ')), this.fields[name].element))), this.refusal,
      h('div', { class: 'row end sticky' }, button('Estimate', () => this.estimate()), h('button', { class: 'btn primary', type: 'submit' }, 'Start the job')));
    this.element = h('div', { class: 'split' }, form, this.side.element);
  }

  body() {
    const training = collect(this.knobs);
    const rest = collect(this.fields);
    const dataset = this.data.get();
    const validation = this.validation.get();
    return { model: this.model.get(), ...(dataset === undefined ? {} : { dataset }), ...(validation === undefined ? {} : { validation_dataset: validation }), ...rest, ...(training ? { training } : {}) };
  }

  set(body) {
    if (body.model) this.model.set(body.model);
    for (const [name, one] of Object.entries(this.fields)) one.set(body[name]);
    for (const [name, one] of Object.entries(this.knobs)) one.set(body.training?.[name]);
    for (const part of this.element.querySelectorAll('details')) if ([...part.querySelectorAll('input:not([type=search]), select')].some((one) => (one.type === 'checkbox' ? one.checked : one.value && one.tagName === 'INPUT'))) part.open = true;
    if (typeof body.dataset === 'string') this.data.set(body.dataset);
    if (typeof body.validation_dataset === 'string') this.validation.set(body.validation_dataset);
  }

  like(job) {
    const { job_uuid: _, ...asked } = job.spec.asked ?? { method: job.spec.method, model: job.model };
    this.set({ ...asked, model: job.model, dataset: job.spec.dataset?.file, validation_dataset: job.spec.validation_dataset?.file });
  }

  changed() { this.side.snippets(this.body()); }

  clear() { fill(this.refusal); for (const one of [...Object.values(this.fields), ...Object.values(this.knobs)]) this.unmark(one); this.model.mark(null); }
  unmark(one) { if (one.parts) one.parts.forEach((part) => this.unmark(part)); else one.mark?.(null); }

  // What the server refused, at the field that it names.
  refused(error) {
    if (!(error instanceof ApiError)) { fill(this.refusal, h('div', { class: 'box bad' }, error.message)); return; }
    const lines = error.errors.filter((one) => one.line);
    const rest = error.errors.filter((one) => !one.line);
    fill(this.refusal, h('div', { class: 'box bad' }, h('strong', {}, error.message), rest.length > 1 && h('ul', {}, rest.map((one) => h('li', {}, one.loc ? `${one.loc}: ` : '', one.message)))));
    if (lines.length) this.data.report({ valid: false, errors: lines, num_errors: lines.length, rows: null, format: null });
    const all = [...Object.values(this.fields), ...Object.values(this.knobs), this.model];
    let first = null;
    for (const { loc, message } of rest.length ? rest : [{ loc: error.param, message: error.message }]) {
      const found = loc && all.map((one) => one.at(loc)).find(Boolean);
      if (!found) continue;
      found.mark(message);
      for (let parent = found.element.closest('details'); parent; parent = parent.parentElement.closest('details')) parent.open = true;
      first ??= found.control;
    }
    first?.focus();
  }

  async submit() {
    this.clear();
    try {
      const job = await post('post_training/jobs', this.body(), {}, this.signal);
      note('The job is queued.');
      location.hash = `#/jobs/${encodeURIComponent(job.job_uuid)}`;
    } catch (error) { this.refused(error); }
  }

  async estimate() {
    this.clear();
    this.side.waiting();
    try { await this.side.plan(await post('post_training/jobs', this.body(), { dry_run: true }, this.signal), this.signal); } catch (error) { this.side.failed(); this.refused(error); }
  }
}

const section = (title, parts) => h('section', { class: 'card part' }, h('h2', {}, title), parts);

function collect(parts) {
  const pairs = Object.entries(parts).map(([name, part]) => [name, part.get()]).filter(([, value]) => value !== undefined);
  return pairs.length ? Object.fromEntries(pairs) : undefined;
}

function modelField(models) {
  const control = h('input', { id: 'model', list: 'models', autocomplete: 'off', spellcheck: 'false', placeholder: 'a model of the server, of the hub, or ft:…', value: models.find((one) => one.kind === 'base')?.id ?? '' });
  const fault = h('small', { class: 'fault' });
  const element = h('div', { class: 'field', 'data-path': 'model' }, h('label', { for: 'model' }, 'model'), control, h('datalist', { id: 'models' }, models.map((one) => h('option', { value: one.id }))), h('small', {}, `${models.length} on this server; a result of another job is trained on.`), fault);
  const mark = (message) => { fill(fault, message ?? ''); if (message) control.setAttribute('aria-invalid', 'true'); else control.removeAttribute('aria-invalid'); };
  return { element, mark, get: () => control.value.trim(), set: (value) => { control.value = value; }, at: (path) => (path === 'model' ? { element, control, mark } : null) };
}

let numbers = 0;

// Rows: an upload, a file that is there already, or lines written here.
class DataField {
  constructor(title, files, changed, signal, form) {
    Object.assign(this, { changed, signal, form });
    const id = `data${numbers += 1}`;
    this.told = h('div', { class: 'report', role: 'status' });
    this.pick = h('select', { id, onchange: () => { this.inline.value = ''; changed(); this.validate(); } }, h('option', { value: '' }, 'choose a file…'), files.map((file) => h('option', { value: file.id }, `${file.filename} · ${bytes(file.bytes)} · ${new Date(file.created_at * 1000).toLocaleDateString()}`)));
    this.file = h('input', { type: 'file', class: 'sr', id: `${id}-file`, accept: '.jsonl,.json,.csv,.parquet,.gz,.zst', onchange: () => this.file.files[0] && this.send(this.file.files[0]) });
    const drop = h('label', { class: 'drop', for: `${id}-file`, ondragover: (event) => { event.preventDefault(); drop.classList.add('over'); }, ondragleave: () => drop.classList.remove('over'),
      ondrop: (event) => { event.preventDefault(); drop.classList.remove('over'); if (event.dataTransfer.files[0]) this.send(event.dataTransfer.files[0]); } }, h('strong', {}, 'Drop a file here'), ' or choose one: JSONL, JSON, CSV, Parquet');
    this.inline = h('textarea', { rows: 4, id: `${id}-rows`, spellcheck: 'false', placeholder: '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}', onchange: () => { if (this.inline.value.trim()) { this.pick.value = ''; this.validate(); } } });
    this.element = h('div', { class: 'data' }, h('div', { class: 'field' }, h('label', { for: id }, title), this.pick), this.file, drop,
      h('details', {}, h('summary', {}, 'Write rows here, one JSON object a line'), h('label', { class: 'sr', for: `${id}-rows` }, 'Rows'), this.inline), this.told);
  }

  get() {
    if (this.pick.value) return this.pick.value;
    const lines = this.inline.value.split('\n').filter((line) => line.trim());
    if (!lines.length) return undefined;
    try { return { rows: lines.map((line) => JSON.parse(line)) }; } catch { return undefined; }
  }

  set(id) {
    if (![...this.pick.options].some((option) => option.value === id)) this.pick.append(h('option', { value: id }, id));
    this.pick.value = id;
  }

  async send(file) {
    const bar = h('progress', { max: 1, value: 0, 'aria-label': 'Upload' });
    fill(this.told, h('div', { class: 'row' }, `Sending ${file.name}, ${bytes(file.size)} `, bar));
    try {
      const made = await upload(file, (share) => { bar.value = share ?? 0; }, this.signal);
      this.pick.append(h('option', { value: made.id }, `${made.filename} · ${bytes(made.bytes)}`));
      this.pick.value = made.id;
      this.changed();
      await this.validate();
    } catch (error) { fill(this.told, h('div', { class: 'box bad' }, error.message)); }
    this.file.value = '';
  }

  async validate() {
    const rows = this.inline.value.split('\n');
    for (const [at, line] of rows.entries()) {
      try { if (line.trim() && !this.pick.value) JSON.parse(line); } catch (error) { this.report({ valid: false, num_errors: 1, errors: [{ line: at + 1, message: error.message }] }); return; }
    }
    const dataset = this.get();
    if (dataset === undefined) { fill(this.told); return; }
    fill(this.told, h('p', { class: 'told' }, 'Looking at every row…'));
    const { method, model, training } = this.form?.body() ?? {};
    const request = { dataset, ...(method ? { method } : {}), ...(training?.train_on ? { train_on: training.train_on } : {}) };
    const look = (more) => post('post_training/datasets/validate', { ...request, ...more }, {}, this.signal);
    try { this.report(await look(model ? { model } : {})); } catch (error) {
      // Rows can be looked at without a model; only their tokens can't be counted then.
      try { if (!model || error.param !== 'model') throw error; this.report(await look({})); } catch (second) { fill(this.told, h('div', { class: 'box bad' }, second.message)); }
    }
  }

  report(report) {
    const tokens = report.tokens ?? {};
    const parts = [report.rows == null ? null : `${number(report.rows)} rows`, report.format, tokens.tokens && `${number(tokens.tokens)} tokens, ${number(tokens.supervised_tokens)} of them learned`, tokens.max_len && `longest ${number(tokens.max_len)}`];
    const errors = report.errors ?? [];
    const ignored = Object.entries(report.ignored ?? {}).map(([name, rows]) => `${name} (${rows} rows)`);
    fill(this.told, h('div', { class: `box ${report.valid ? 'good' : 'bad'}` }, h('strong', {}, report.valid ? 'Every row is good. ' : `${number(report.num_errors)} ${report.num_errors === 1 ? 'row is' : 'rows are'} bad. `), parts.filter(Boolean).join(' · '),
      ignored.length ? h('p', {}, `Keys that mean nothing: ${ignored.join(', ')}`) : null, (report.warnings ?? []).map((one) => h('p', {}, `${one.message} (${one.rows} rows, line ${one.lines.slice(0, 5).join(', ')})`)),
      errors.length ? h('div', { class: 'scroll errors' }, h('table', {}, h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Line'), h('th', { scope: 'col' }, 'What is wrong'))), h('tbody', {}, errors.slice(0, SHOWN_ERRORS).map((one) => h('tr', {}, h('td', { class: 'mono' }, one.line ?? ''), h('td', {}, one.loc ? `${one.loc}: ` : '', one.message)))))) : null));
  }
}

// Beside the form: the estimate, and the same request for a shell and for Python.
class Side {
  constructor(form) {
    this.form = form;
    this.estimate = h('div', { role: 'status' }, h('p', { class: 'told' }, 'Estimate tells steps, tokens and memory, and starts nothing.'));
    this.curl = h('pre', { class: 'code', tabindex: 0, 'aria-label': 'curl' });
    this.python = h('pre', { class: 'code', tabindex: 0, 'aria-label': 'Python' });
    this.element = h('aside', {}, h('section', { class: 'card part' }, h('h2', {}, 'Estimate'), this.estimate),
      h('section', { class: 'card part' }, h('div', { class: 'row' }, h('h2', {}, 'curl'), h('span', { class: 'grow' }), copier(() => this.curl.textContent)), this.curl),
      h('section', { class: 'card part' }, h('div', { class: 'row' }, h('h2', {}, 'Python'), h('span', { class: 'grow' }), copier(() => this.python.textContent)), this.python));
  }

  snippets(body) {
    const base = document.baseURI;
    this.curl.textContent = curl(base, body, Boolean(key.get()));
    this.python.textContent = python(base, body, Boolean(key.get()));
  }

  waiting() { fill(this.estimate, h('p', { class: 'told' }, 'The trainer looks at the model and the rows…')); }
  failed() { fill(this.estimate, h('p', { class: 'told' }, 'There is no estimate: see what is marked.')); }

  async plan(plan, signal) {
    const speed = await this.speed(plan, signal);
    const { memory } = plan;
    const facts = [['Steps', number(plan.steps)], ['Tokens', number(plan.tokens)], ['Parameters', number(plan.parameters)], ['Trained', plan.trainable_parameters ? `${number(plan.trainable_parameters)} (${number((100 * plan.trainable_parameters) / plan.parameters, 3)} %)` : '–'],
      ['Memory', memory ? `${bytes(memory.per_rank_bytes)} a rank, ${bytes(memory.total_bytes)} in all` : '–'], ['Devices', plan.devices.join(', ') || '–'], ['Rows', number(plan.dataset?.rows)], ['Packing', packed(plan)], ['Time', speed]];
    fill(this.estimate, h('dl', { class: 'facts plain' }, facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value)))),
      memory && h('div', { class: `box ${memory.fits === false ? 'bad' : 'good'}` }, memory.fits === false ? 'This does not fit into the memory of the devices.' : 'This fits into memory.'),
      plan.warnings.map((text) => h('div', { class: 'box warn' }, text)), h('details', {}, h('summary', {}, 'The command'), h('pre', { class: 'code' }, plan.argv.join(' '))));
  }

  // There is no other honest source for the time than a job that ran: its speed on the same model and method.
  async speed(plan, signal) {
    if (!plan.tokens) return '–';
    const { data } = await get('post_training/jobs', { limit: 100 }, signal);
    const adapted = (spec) => Boolean(spec?.training?.lora);
    const alike = data.find((job) => job.model === plan.spec.model && job.progress?.tokens_per_s && adapted(job.spec) === adapted(plan.spec));
    return alike ? `about ${duration(plan.tokens / alike.progress.tokens_per_s)}, as fast as ${alike.name ?? alike.job_uuid}` : 'unknown: no job has trained this model yet';
  }
}

function packed({ packing, spec }) {
  if (!packing) return '–';
  const [packedShare, paddedShare] = [packing.efficiency, packing.padded_efficiency].map((share) => `${number(100 * share, 3)} %`);
  return spec.training?.is_padding_free === false ? `${paddedShare} full with padding (${packedShare} packed)` : `${packedShare} full (${paddedShare} with padding)`;
}
