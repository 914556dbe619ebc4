"""Data sets under names of their own.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "datasets",
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(64), nullable=False),
        sa.Column("source", _JSON, nullable=False),
        sa.Column("file_id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("metadata", _JSON, nullable=False),
        sa.PrimaryKeyConstraint("dataset_id", name="pk_datasets"),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name="fk_datasets_file_id_files"),
    )
    op.create_index("ix_datasets_file_id", "datasets", ["file_id"])
    op.create_index("ix_datasets_created_at_dataset_id", "datasets", ["created_at", "dataset_id"])


def downgrade() -> None:
    op.drop_table("datasets")
