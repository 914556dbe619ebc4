"""llama-stack's post-training routes, under both of its prefixes and in both of its styles of address."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from posttrain_service.api.answers import Answer, error_answer
from posttrain_service.api.deps import IdempotencyKey, Use, json_body, only
from posttrain_service.api.strict_json import StrictRoute
from posttrain_service.errors import InvalidRequest
from posttrain_service.wire import llama_shapes as shapes
from posttrain_service.wire.errors import field_errors, summary
from posttrain_service.wire.llama_request import CancelJob, PreferenceOptimize, SupervisedFineTune
from posttrain_service.wire.llama_translate import LlamaAsked, inward, retold, translate_dpo, translate_sft
from posttrain_service.wire.llama_views import artifacts_json, job_entry, status_json
from posttrain_service.work.services import Services
from posttrain_service.work.terms import Terms

PREFIXES = {"": "/v1", "_alpha": "/v1alpha"}
"""Endings of the operations' names, and prefixes of their paths."""
_JOB: dict[int | str, dict[str, Any]] = {200: {"model": shapes.PostTrainingJob}}
_STATUS: dict[int | str, dict[str, Any]] = {200: {"model": shapes.PostTrainingJobStatus}}
_ARTIFACTS: dict[int | str, dict[str, Any]] = {200: {"model": shapes.PostTrainingJobArtifacts}}
_NULL: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "null"}}}}}

Asked = Annotated[str, Query(min_length=1, description="The job's id.")]
Perhaps = Annotated[str | None, Query(min_length=1, description="The job's id, unless the body has it.")]


class LlamaRoute(StrictRoute):
    """A route that answers what is wrong with a request by 400, as llama-stack's server does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with those errors caught."""
        handle = super().get_route_handler()

        async def with_400(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                found = error.errors()
                if any(item.get("type") == "json_invalid" for item in found):
                    raise
                faults = field_errors(found, error.body)
                return error_answer(400, summary(faults), code="invalid_request", param=faults[0]["loc"] or None, errors=faults)
            except InvalidRequest as error:
                return error_answer(400, error.message, code=error.code, param=error.param, errors=error.errors or None)

        return with_400


router = APIRouter(tags=["llama_stack"], route_class=LlamaRoute)


def supervised_fine_tune(body: Annotated[SupervisedFineTune, Body()], services: Use, key: IdempotencyKey) -> Response:
    """Train on conversations. The same id with the same body is the same job."""
    return _created(services, translate_sft(body), key, "model")


def preference_optimize(body: Annotated[PreferenceOptimize, Body()], services: Use, key: IdempotencyKey) -> Response:
    """Train on pairs of answers. The same id with the same body is the same job."""
    return _created(services, translate_dpo(body), key, "finetuned_model")


def list_jobs(services: Use) -> Response:
    """Every job, by whichever API it was made."""
    return Answer({"data": [job_entry(job_uuid, state) for job_uuid, state in services.jobs.states()]})


def job_status(job_uuid: Asked, services: Use) -> Response:
    """How a job is."""
    return Answer(status_json(services.jobs.get(inward(job_uuid)), _root(services)))


def job_artifacts(job_uuid: Asked, services: Use) -> Response:
    """What a job has made."""
    return Answer(artifacts_json(services.jobs.get(inward(job_uuid)), _root(services)))


def cancel_job(services: Use, job_uuid: Perhaps = None, body: Annotated[CancelJob | None, Body()] = None) -> Response:
    """Stop a job for good. Repeating is harmless. The id is in the body or the query."""
    told = job_uuid if body is None else body.job_uuid
    if told is None or (job_uuid is not None and job_uuid != told):
        raise InvalidRequest("job_uuid is needed, once: in the body or in the query", param="job_uuid")
    return _cancelled(services, told)


def status_of_job(job_uuid: str, services: Use) -> Response:
    """How a job is."""
    return job_status(job_uuid, services)


def artifacts_of_job(job_uuid: str, services: Use) -> Response:
    """What a job has made."""
    return job_artifacts(job_uuid, services)


def cancel_one_job(job_uuid: str, services: Use) -> Response:
    """Stop a job for good. Repeating is harmless."""
    return _cancelled(services, job_uuid)


def _add(path: str, method: str, endpoint: Callable[..., Response], responses: dict[int | str, dict[str, Any]], *query: str) -> None:
    takes_body = method == "POST" and "job" not in path.split("/")[1]
    needs = [only(*query), *([Depends(json_body)] if takes_body else [])]
    for ending, prefix in PREFIXES.items():
        router.add_api_route(
            f"{prefix}/post-training{path}", endpoint, methods=[method], name=f"llama_{endpoint.__name__}{ending}",
            responses=responses, dependencies=needs,
        )  # fmt: skip


_add("/supervised-fine-tune", "POST", supervised_fine_tune, _JOB)
_add("/preference-optimize", "POST", preference_optimize, _JOB)
_add("/jobs", "GET", list_jobs, {200: {"model": shapes.PostTrainingJobList}})
_add("/job/status", "GET", job_status, _STATUS, "job_uuid")
_add("/job/artifacts", "GET", job_artifacts, _ARTIFACTS, "job_uuid")
_add("/job/cancel", "POST", cancel_job, _NULL, "job_uuid")
_add("/jobs/{job_uuid:path}/status", "GET", status_of_job, _STATUS)
_add("/jobs/{job_uuid:path}/artifacts", "GET", artifacts_of_job, _ARTIFACTS)
_add("/jobs/{job_uuid:path}/cancel", "POST", cancel_one_job, _NULL)


def _created(services: Services, asked: LlamaAsked, key: str | None, model: str) -> Answer:
    try:
        view, _ = services.jobs.create(
            asked.request, idempotency_key=key, terms=Terms(unwanted=asked.unwanted, warnings=asked.warnings)
        )
    except InvalidRequest as error:
        raise retold(error, model) from error
    return Answer(job_entry(view.job.job_uuid, view.job.state))


def _cancelled(services: Services, job_uuid: str) -> Answer:
    services.jobs.cancel(inward(job_uuid))
    return Answer(None)


def _root(services: Services) -> str:
    """Whoever is on this machine is told where checkpoints are; others learn no path of it."""
    return f"{services.settings.storage_dir}/" if services.settings.is_loopback else ""
