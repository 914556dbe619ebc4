// The service's HTTP API as the page uses it: the key, errors as sentences, streams that go on where they broke off.

const KEY = 'posttrain-key';
let asking = null;
let askForKey = async () => null;

export const key = {
  get: () => { try { return sessionStorage.getItem(KEY); } catch { return null; } },
  set: (value) => { try { if (value) sessionStorage.setItem(KEY, value); else sessionStorage.removeItem(KEY); } catch { /* storage is blocked: the key is asked for again */ } },
};

export function onKeyNeeded(ask) { askForKey = ask; }

export class ApiError extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message ?? `the server answered ${status}`);
    Object.assign(this, { status, body, code: error.code, param: error.param, errors: error.errors ?? [] });
  }
}

export class Unreachable extends Error {}

export function address(path, query = {}) {
  const url = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined) url.searchParams.append(name, one);
  }
  return url;
}

export const jobPath = (uuid, rest = '') => `post_training/jobs/${encodeURIComponent(uuid)}${rest}`;

// One request; waits for a key where one is needed. Gives the Response, whose status is good.
export async function call(method, path, { query, json, headers = {}, signal } = {}) {
  for (;;) {
    const sent = key.get();
    const response = await reach(address(path, query), {
      method, signal, cache: 'no-store', credentials: 'omit',
      headers: { accept: 'application/json', ...headers, ...(sent ? { authorization: `Bearer ${sent}` } : {}), ...(json === undefined ? {} : { 'content-type': 'application/json' }) },
      body: json === undefined ? undefined : JSON.stringify(json),
    });
    if (response.status === 401) {
      const error = new ApiError(401, await body(response));
      if (key.get() === sent) {
        asking ??= askForKey(error.message, sent).finally(() => { asking = null; });
        if (!(await asking)) throw error;
      }
      continue;
    }
    if (!response.ok) throw new ApiError(response.status, await body(response));
    return response;
  }
}

async function reach(url, options) {
  try { return await fetch(url, options); } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Unreachable('The server does not answer. Jobs train on without it; this page goes on as soon as it is back.');
  }
}

async function body(response) { try { return await response.json(); } catch { return null; } }

export const get = async (path, query, signal) => (await call('GET', path, { query, signal })).json();
export const post = async (path, json, query, signal) => (await call('POST', path, { json, query, signal })).json();
export const remove = (path) => call('DELETE', path);

// Upload by XMLHttpRequest, which tells how far it is; fetch doesn't.
export function upload(file, onProgress, signal) {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    form.append('purpose', 'fine-tune');
    form.append('file', file, file.name);
    const request = new XMLHttpRequest();
    request.open('POST', address('v1/files'));
    if (key.get()) request.setRequestHeader('authorization', `Bearer ${key.get()}`);
    request.responseType = 'json';
    request.upload.onprogress = (event) => onProgress(event.lengthComputable ? event.loaded / event.total : null);
    request.onload = () => (request.status < 300 ? resolve(request.response) : reject(new ApiError(request.status, request.response)));
    request.onerror = () => reject(new Unreachable('The upload broke off: the server does not answer.'));
    signal?.addEventListener('abort', () => request.abort());
    request.send(form);
  });
}

// Server-sent events by fetch: EventSource could send no key. Reconnects with the last id, and rests while the page is hidden,
// since browsers open only six connections to a server. Ends with the stream's `end`, or by `signal`.
export async function stream(path, { query = {}, lastId = null, onItem, onState = () => {}, signal }) {
  let wait = 500;
  while (!signal.aborted) {
    await visible(signal);
    const hidden = new AbortController();
    const stop = () => { if (document.hidden || signal.aborted) hidden.abort(); };
    document.addEventListener('visibilitychange', stop);
    signal.addEventListener('abort', stop);
    try {
      const headers = { accept: 'text/event-stream', ...(lastId ? { 'last-event-id': lastId } : {}) };
      const response = await call('GET', path, { query, headers, signal: hidden.signal });
      onState(true);
      for await (const item of events(response.body)) {
        wait = 500;
        if (item.id) lastId = item.id;
        if (signal.aborted) return;
        onItem(item.event, JSON.parse(item.data), item.id);
        if (item.event === 'end') return;
      }
    } catch (error) {
      if (error instanceof ApiError) throw error;
      if (signal.aborted) return;
    } finally {
      document.removeEventListener('visibilitychange', stop);
      signal.removeEventListener('abort', stop);
      hidden.abort();
    }
    if (!document.hidden) { onState(false); await rest(wait, signal); wait = Math.min(10000, wait * 2); }
  }
}

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  let item = {};
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (text + value).split('\n');
    text = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith('\r') ? raw.slice(0, -1) : raw;
      if (line === '') {
        if (item.data !== undefined) yield item;
        item = {};
        continue;
      }
      const colon = line.indexOf(':');
      if (colon === 0) continue;
      const name = colon < 0 ? line : line.slice(0, colon);
      const rest = colon < 0 ? '' : line.slice(colon + 1).replace(/^ /, '');
      item[name] = name === 'data' && item.data !== undefined ? `${item.data}\n${rest}` : rest;
    }
  }
}

export const rest = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(resolve, ms);
  signal?.addEventListener('abort', () => { clearTimeout(timer); resolve(); }, { once: true });
});

const visible = (signal) => new Promise((resolve) => {
  if (!document.hidden) { resolve(); return; }
  const look = () => { if (!document.hidden || signal.aborted) { document.removeEventListener('visibilitychange', look); resolve(); } };
  document.addEventListener('visibilitychange', look);
  signal.addEventListener('abort', look, { once: true });
});

// Do something again and again while the page is seen; a failure is told and tried again.
export async function repeat(every, signal, action, onError) {
  while (!signal.aborted) {
    await visible(signal);
    let next = every;
    try { next = (await action()) ?? every; } catch (error) {
      if (signal.aborted || error.name === 'AbortError') return;
      onError(error);
      next = Math.max(every, 2000);
    }
    if (next === Infinity) return;
    await rest(next, signal);
  }
}

// Save what the server sends. With a key a plain link would lack it: then the answer is written to a file piece by piece,
// where the browser can, and is collected first where it can't.
export async function download(path, name, accept = '*/*') {
  if (!key.get() && accept === '*/*') {
    const link = Object.assign(document.createElement('a'), { href: address(path), download: name });
    link.click();
    return;
  }
  const target = accept === '*/*' && window.showSaveFilePicker ? await window.showSaveFilePicker({ suggestedName: name }) : null;
  const response = await call('GET', path, { headers: { accept } });
  if (target) { await response.body.pipeTo(await target.createWritable()); return; }
  const link = Object.assign(document.createElement('a'), { href: URL.createObjectURL(await response.blob()), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
