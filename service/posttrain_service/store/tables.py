"""The tables. Times are seconds since the epoch, UTC: time-zone offsets are dropped by SQLite, numbers are not.

A change here needs a migration in `migrations/versions`; a test compares the two on both databases.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# None becomes SQL NULL, never the JSON text "null", so that "is null" means one thing.
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
# Only INTEGER PRIMARY KEY counts up by itself on SQLite.
EventId = BigInteger().with_variant(Integer(), "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("run_id", String(36), primary_key=True),
    Column("job_uuid", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False),
    Column("name", Text),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("error", Json),
    Column("warnings", Json, nullable=False),
    Column("method", String(32), nullable=False),
    Column("model", Text, nullable=False),
    Column("spec", Json, nullable=False),
    Column("body_digest", String(64), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("metadata", Json, nullable=False),
    Column("file_ids", Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("moved_at", Double, nullable=False),
    Column("launched_at", Double),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("expires_at", Double),
    Column("deadline_at", Double),
    Column("condemned_at", Double),
    Column("attempt", Integer, nullable=False),
    Column("want", String(8)),
    Column("devices_wanted", Json, nullable=False),
    Column("devices", Json, nullable=False),
    Column("progress", Json),
    Column("max_duration_s", Double),
    Column("queue_ttl_s", Double),
    Column("ttl_s", Double),
    Column("keep", Boolean, nullable=False),
    Column("retry_max_attempts", Integer, nullable=False),
    Column("retry_on", Json, nullable=False),
    Column("retries", Integer, nullable=False, server_default="0"),
    Column("version", Integer, nullable=False),
    Index(None, "created_at", "run_id"),
    Index(None, "state", "created_at", "run_id"),
    Index(None, "owner", "created_at", "run_id"),
    Index(None, "expires_at"),
    # Partial, or SQLite prefers it for "is null", which nearly all rows are, and sorts them all for each page.
    Index(
        None,
        "condemned_at",
        sqlite_where=text("condemned_at IS NOT NULL"),
        postgresql_where=text("condemned_at IS NOT NULL"),
    ),
)

# Labels and files stand in `jobs` too (both never change); these rows are what is searched by.
job_labels = Table(
    "job_labels",
    metadata,
    Column("run_id", String(36), ForeignKey("jobs.run_id", ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Index(None, "key", "value", "created_at", "run_id"),
)

job_files = Table(
    "job_files",
    metadata,
    Column("run_id", String(36), ForeignKey("jobs.run_id", ondelete="CASCADE"), primary_key=True),
    Column("file_id", String(64), primary_key=True),
    Index(None, "file_id"),
)

events = Table(
    "events",
    metadata,
    Column("id", EventId, primary_key=True, autoincrement=True),
    Column("run_id", String(36), ForeignKey("jobs.run_id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("type", String(32), nullable=False),
    Column("level", String(8), nullable=False),
    Column("message", Text, nullable=False),
    Column("data", Json, nullable=False),
    Index(None, "run_id", "id"),
    sqlite_autoincrement=True,  # an id is never given twice, so that it can be a cursor
)

slot_leases = Table(
    "slot_leases",
    metadata,
    Column("device", String(100), primary_key=True),
    Column("run_id", String(36), ForeignKey("jobs.run_id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("taken_at", Double, nullable=False),
    Index(None, "run_id"),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", String(64), nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("purpose", String(32), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("report", Json, nullable=False),
    Index(None, "created_at", "id"),
    Index(None, "purpose", "created_at", "id"),
    Index(None, "expires_at"),
)

datasets = Table(
    "datasets",
    metadata,
    Column("dataset_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("purpose", String(64), nullable=False),
    Column("source", Json, nullable=False),
    Column("file_id", String(64), ForeignKey("files.id"), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("metadata", Json, nullable=False),
    Index(None, "file_id"),
    Index(None, "created_at", "dataset_id"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("scope", String(16), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("label", Text),
    Column("revoked_at", Double),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("scope", String(64), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("body_digest", String(64), nullable=False),
    Column("resource_id", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index(None, "expires_at"),
)

# No foreign key: what was promised to a receiver is sent even when the job has been deleted meanwhile.
webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run_id", String(36), nullable=False),
    Column("url", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("next_try_at", Double, nullable=False),
    Index(None, "next_try_at"),
)
