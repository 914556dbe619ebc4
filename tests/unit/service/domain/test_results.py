"""Names of what jobs have made."""

import pytest

from posttrain_service.domain.results import parse_result, result_name


@pytest.mark.parametrize(
    ("model", "name", "step", "full"),
    [
        ("m", None, None, "ft:m:posttrain::J"),
        ("org/m", "my run", None, "ft:org/m:posttrain:my-run:J"),
        ("m", "a:b/c é", 100, "ft:m:posttrain:a-b-c:J:ckpt-step-100"),
        ("m", "x" * 300, None, f"ft:m:posttrain:{'x' * 64}:J"),
        ("ft:m:posttrain:first:J0:ckpt-step-7", "second", None, "ft:m:posttrain:second:J"),
        ("ft:odd:name:posttrain:a:J0", None, None, "ft:odd:name:posttrain::J"),
    ],
)
def test_names_there_and_back(make_job, model, name, step, full):
    job = make_job("succeeded", job_uuid="J", model=model, name=name)
    assert result_name(job, step) == full
    parts = parse_result(full)
    assert (parts.job_uuid, parts.step) == ("J", step)
    assert result_name(make_job("succeeded", job_uuid="J", model=parts.base, name=parts.suffix), parts.step) == full


@pytest.mark.parametrize(
    "name",
    ["m", "org/m", "ft:m", "ft:m:other:s:J", "ft::posttrain:s:J", "ft:m:posttrain:s:", "ft:m:posttrain:s:J:ckpt-step-",
     "ft:m:posttrain:s:J:step-1", "ft:m:posttrain:s:a:b"],
)  # fmt: skip
def test_what_is_no_result(name):
    assert parse_result(name) is None
