"""The outbox of webhooks; how many failures of a job its policy has retried.

Revision ID: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("retries", sa.Integer(), nullable=False, server_default="0"))
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(36), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("next_try_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_next_try_at", "webhooks", ["next_try_at"])


def downgrade() -> None:
    op.drop_table("webhooks")
    op.drop_column("jobs", "retries")
