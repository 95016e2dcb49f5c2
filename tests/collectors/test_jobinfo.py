"""What a job says of itself: read by Job without a word from the user, and without what may be secret."""

import argparse
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import job as job_module
from traceanalyzer.collectors import jobinfo, marks

sys.path.insert(0, str(Path(__file__).parent))
from marked_jobs import Marked, folder_of, needs_megatron, run

COMMON: dict[str, Any] = {
    "framework": "megatron-core",
    "megatron_core_version": "0.16.1",
    "world_size": 2,
    "order": "tp-cp-ep-dp-pp",
    "micro_batch_size": 2,
    "seq_length": 32,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "padded_vocab_size": 256,
    "untie_embeddings_and_output_weights": False,
    "bf16": True,
    "params_dtype": "bfloat16",
    "accumulate_allreduce_grads_in_fp32": True,
    "optimizer": "adam",
    "clip_grad": 1.0,
    "forward_only": False,
    "enable_gloo_process_groups": False,
}

EXPECTED: dict[str, dict[str, Any]] = {
    "tp2_sp_recompute": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 1,
        "num_layers": 2,
        "num_microbatches": 2,
        "global_batch_size": 4,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "use_distributed_optimizer": False,
        "num_experts": None,
    },
    "pp2_interleaved": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": 2,
        "num_layers": 4,
        "num_microbatches": 4,
        "global_batch_size": 8,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    },
    "dp2_distopt_overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "align_grad_reduce": False,
        "align_param_gather": False,
        "ddp_bucket_size": 40_000,
        "num_microbatches": 2,
        "global_batch_size": 8,
    },
    "ep2": {
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 128,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": 0.01,
        "moe_layer_freq": 1,
        "global_batch_size": 8,
    },
}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory)


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    yield
    marks.uninstall()


def job(base: Path, configuration: str) -> Marked:
    needs_megatron()
    return run(base, "megatron_job", configuration)


@pytest.mark.megatron
@pytest.mark.parametrize("configuration", EXPECTED)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_job_of_bare_megatron_core_is_complete(base: Path, configuration: str, rank: int) -> None:
    said = [r[1] for r in job(base, configuration).records(rank) if r[0] == "job"]
    assert len(said) == 1  # at the first step; nothing changed since
    found = job_module.parse_mapping(said[0]["job"])
    expected = {**COMMON, **EXPECTED[configuration]}
    assert {name: getattr(found, name) for name in expected} == expected
    assert "unread" not in said[0]


@pytest.mark.megatron
def test_groups_have_their_roles_and_ranks(base: Path) -> None:
    said = next(r[1] for r in job(base, "ep2").records(1) if r[0] == "job")
    ranks = {role: group["ranks"] for role, group in said["groups"].items()}
    assert {role: ranks[role] for role in ("tp", "dp", "dp_cp", "ep", "edp", "tp_ep", "pp")} == {
        "tp": [1],
        "dp": [0, 1],
        "dp_cp": [0, 1],
        "ep": [0, 1],
        "edp": [1],
        "tp_ep": [0, 1],
        "pp": [1],
    }
    assert said["place"] == {"tp": 0, "pp": 0, "cp": 0, "dp": 1, "ep": 1, "etp": 0}
    assert said["versions"]["torch"].startswith("2.")
    assert said["device"]["kind"] == "cpu"


def test_megatron_lm_gives_its_arguments_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = argparse.Namespace(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=8,
        tensor_model_parallel_size=2,
        world_size=16,
        micro_batch_size=1,
        global_batch_size=32,
        seq_length=64,
        padded_vocab_size=512,
        bf16=True,
        wandb_api_key="do not keep",
        some_function=print,
        load=None,
        data_path=["a", "b"],
        lr=float("inf"),
    )
    variables = types.ModuleType("megatron.training.global_vars")
    variables.__dict__["get_args"] = lambda: arguments
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    said = jobinfo.capture()["job"]
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert not {"wandb_api_key", "some_function", "load"} & set(said)
    assert said["data_path"] == ["a", "b"]
    found = job_module.parse_mapping(said)
    assert (found.framework, found.num_layers, found.world_size, found.num_microbatches) == ("megatron-lm", 4, 16, 4)


def test_the_environment_is_kept_by_names_that_belong_to_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(__import__("os").environ):
        if name.startswith(jobinfo.PREFIXES):
            monkeypatch.delenv(name)
    for name, value in {
        "NCCL_ALGO": "Ring",
        "NVTE_BATCH_MHA_P2P_COMM": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_API_KEY": "secret",
        "HF_TOKEN": "secret",
        "HOME_OF_SECRETS": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    said = jobinfo.capture()
    assert said["environment"] == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_ALGO": "Ring",
        "NVTE_BATCH_MHA_P2P_COMM": "1",
    }
    assert said["job"]["nvte_batch_mha_p2p_comm"] is True


def test_what_cannot_be_read_is_named_and_the_rest_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parallel(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name == "_EXPERT_MODEL_PARALLEL_GROUP":
                raise RuntimeError("gone")
            return None

    pytest.importorskip("torch", reason="needs torch")
    import torch.distributed  # so that groups are asked for

    assert torch.distributed is not None
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", Parallel("parallel_state"))
    said = jobinfo.capture()
    assert said["unread"] == {"groups": "RuntimeError: gone"}
    assert said["host"]["processors"] >= 1


class Log:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def put(self, record: Any) -> None:
        self.records.append(record)


def test_the_record_is_written_again_when_it_changes_only() -> None:
    log, other = Log(), Log()
    said = jobinfo.record(log)
    said = jobinfo.record(log, said)
    assert len(log.records) == 1
    marks.seen.schedule = {"name": "forward_backward_no_pipelining", "num_microbatches": 4, "seq_length": 8}
    said = jobinfo.record(log, said)
    assert len(log.records) == 1  # no Megatron here: the schedule says nothing of the job
    jobinfo.record(other, said)
    assert len(other.records) == 1
    assert log.records[0][0] == "job"
