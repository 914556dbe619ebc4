"""Name -> launch backend. A backend's module is imported when it is asked for, so its packages stay optional."""

from __future__ import annotations

from posttrain_service.errors import InvalidSettings
from posttrain_service.launch.backend import LaunchBackend
from posttrain_service.settings import Settings
from posttrain_trainer.contract.logcap import ENV_LOG_QUOTA
from posttrain_trainer.contract.space import ENV_DISK_RESERVE

NAMES = ("local",)


def backend(name: str, settings: Settings) -> LaunchBackend:
    """The backend of that name, set up from the settings.

    Raises:
        InvalidSettings: No backend has that name.
    """
    if name == "local":
        from posttrain_service.launch.local import LocalBackend

        return LocalBackend(
            trainer_python=settings.trainer_python,
            stop_grace_s=settings.stop_grace_s,
            cpu_slots=settings.cpu_slots,
            limits={ENV_LOG_QUOTA: str(settings.log_quota_bytes), ENV_DISK_RESERVE: str(settings.disk_reserve_bytes)},
        )
    raise InvalidSettings(f"there is no launch backend {name!r}; there is {', '.join(NAMES)}")
