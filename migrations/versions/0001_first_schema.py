"""First schema: jobs, their labels, files and events, uploads, leases, idempotency keys.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")
EventId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    jobs()
    job_parts()
    others()


def jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("job_uuid", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(32)),
        sa.Column("error", Json),
        sa.Column("warnings", Json, nullable=False),
        sa.Column("method", sa.String(32), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("spec", Json, nullable=False),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("metadata", Json, nullable=False),
        sa.Column("file_ids", Json, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("moved_at", sa.Double(), nullable=False),
        sa.Column("launched_at", sa.Double()),
        sa.Column("started_at", sa.Double()),
        sa.Column("ended_at", sa.Double()),
        sa.Column("expires_at", sa.Double()),
        sa.Column("deadline_at", sa.Double()),
        sa.Column("condemned_at", sa.Double()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("want", sa.String(8)),
        sa.Column("devices_wanted", Json, nullable=False),
        sa.Column("devices", Json, nullable=False),
        sa.Column("progress", Json),
        sa.Column("max_duration_s", sa.Double()),
        sa.Column("queue_ttl_s", sa.Double()),
        sa.Column("ttl_s", sa.Double()),
        sa.Column("keep", sa.Boolean(), nullable=False),
        sa.Column("retry_max_attempts", sa.Integer(), nullable=False),
        sa.Column("retry_on", Json, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_jobs"),
        sa.UniqueConstraint("job_uuid", name="uq_jobs_job_uuid"),
    )
    op.create_index("ix_jobs_created_at_run_id", "jobs", ["created_at", "run_id"])
    op.create_index("ix_jobs_state_created_at_run_id", "jobs", ["state", "created_at", "run_id"])
    op.create_index("ix_jobs_owner_created_at_run_id", "jobs", ["owner", "created_at", "run_id"])
    op.create_index("ix_jobs_expires_at", "jobs", ["expires_at"])
    marked = sa.text("condemned_at IS NOT NULL")
    op.create_index("ix_jobs_condemned_at", "jobs", ["condemned_at"], sqlite_where=marked, postgresql_where=marked)


def job_parts() -> None:
    op.create_table(
        "job_labels",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "key", name="pk_job_labels"),
        sa.ForeignKeyConstraint(["run_id"], ["jobs.run_id"], name="fk_job_labels_run_id_jobs", ondelete="CASCADE"),
    )
    op.create_index(
        "ix_job_labels_key_value_created_at_run_id", "job_labels", ["key", "value", "created_at", "run_id"]
    )
    op.create_table(
        "job_files",
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("file_id", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "file_id", name="pk_job_files"),
        sa.ForeignKeyConstraint(["run_id"], ["jobs.run_id"], name="fk_job_files_run_id_jobs", ondelete="CASCADE"),
    )
    op.create_index("ix_job_files_file_id", "job_files", ["file_id"])
    op.create_table(
        "events",
        sa.Column("id", EventId, autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("level", sa.String(8), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["run_id"], ["jobs.run_id"], name="fk_events_run_id_jobs", ondelete="CASCADE"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_run_id_id", "events", ["run_id", "id"])
    op.create_table(
        "slot_leases",
        sa.Column("device", sa.String(100), nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("device", name="pk_slot_leases"),
        sa.ForeignKeyConstraint(["run_id"], ["jobs.run_id"], name="fk_slot_leases_run_id_jobs"),
    )
    op.create_index("ix_slot_leases_run_id", "slot_leases", ["run_id"])


def others() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("report", Json, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_created_at_id", "files", ["created_at", "id"])
    op.create_index("ix_files_purpose_created_at_id", "files", ["purpose", "created_at", "id"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "idempotency",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body_digest", sa.String(64), nullable=False),
        sa.Column("resource_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("owner", "scope", "key", name="pk_idempotency"),
    )
    op.create_index("ix_idempotency_expires_at", "idempotency", ["expires_at"])


def downgrade() -> None:
    for table in ("idempotency", "files", "leases", "slot_leases", "events", "job_files", "job_labels", "jobs"):
        op.drop_table(table)
