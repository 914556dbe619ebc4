// The same request for a shell and for Python.

const shell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(base, body, withKey) {
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $POSTTRAIN_API_KEY"' : '';
  return `curl -sS ${shell(`${base}post_training/jobs`)}${key} \\\n  --json ${shell(JSON.stringify(body, null, 2))}\n`;
}

export function python(base, body, withKey) {
  const key = withKey ? ', api_key=os.environ["POSTTRAIN_API_KEY"]' : '';
  return `${withKey ? 'import os\n\n' : ''}from posttrain_service.client import Client\n\nwith Client(${literal(base.replace(/\/$/, ''))}${key}) as client:\n    job = client.create_job(${literal(body, '    ')})\n    print(client.wait(job["job_uuid"])["status"])\n`;
}

export function literal(value, indent = '') {
  if (value === null) return 'None';
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (typeof value === 'string') return JSON.stringify(value); // what JSON escapes, Python reads
  if (typeof value === 'number') return String(value);
  const inner = `${indent}    `;
  if (Array.isArray(value)) return value.length ? `[${value.map((one) => literal(one, indent)).join(', ')}]` : '[]';
  const pairs = Object.entries(value);
  return pairs.length ? `{\n${pairs.map(([name, one]) => `${inner}${literal(name)}: ${literal(one, inner)},\n`).join('')}${indent}}` : '{}';
}
