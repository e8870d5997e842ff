"""Reading a profiler's trace: names, nesting, and the times that must add up."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.bench.trace import OpClass, StepPhase, op_class, read_trace

KERNELS = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": (
        OpClass.MATRIX
    ),
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT": OpClass.MATRIX,
    "nvjet_hsh_192x192_64x4_1x2_h_bz_coopB_TNN": OpClass.MATRIX,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn>": (
        OpClass.MATRIX
    ),
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)": OpClass.MATRIX,
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn": OpClass.MATRIX,
    "triton_tem_fused_mm_3": OpClass.MATRIX,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128": OpClass.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_29": OpClass.ATTENTION,
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>": (
        OpClass.ATTENTION
    ),
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": OpClass.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": OpClass.ATTENTION,
    "triton_tem_fused_flex_attention_0": OpClass.ATTENTION,
    "triton_red_fused__to_copy_native_layer_norm_native_layer_norm_backward_12": OpClass.FUSED,
    "triton_poi_fused_gelu_gelu_backward_4": OpClass.FUSED,
    "triton_per_fused_add_native_layer_norm_3": OpClass.FUSED,
    "triton_red_fused__log_softmax_nll_loss_forward_9": OpClass.HEAD,
    "triton_poi_fused_add_embedding_0": OpClass.EMBEDDING,
    "triton_poi_fused_embedding_dense_backward_21": OpClass.EMBEDDING,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdamMath>": (
        OpClass.OPTIMIZER
    ),
    "void at::native::lpnorm_cleanup<float, ...>": OpClass.OPTIMIZER,
    "Memcpy HtoD (Pinned -> Device)": OpClass.COPIES,
    "Memcpy DtoH (Device -> Pinned)": OpClass.COPIES,
    "Memset (Device)": OpClass.COPIES,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)>": (
        OpClass.COPIES
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": (
        OpClass.COPIES
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": (
        OpClass.FUSED
    ),
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": OpClass.FUSED,
    "aten::mm": OpClass.MATRIX,
    "aten::addmm": OpClass.MATRIX,
    "aten::addmm_": OpClass.MATRIX,
    "aten::_scaled_mm": OpClass.MATRIX,
    "aten::_scaled_dot_product_flash_attention_for_cpu": OpClass.ATTENTION,
    "_activated_product": OpClass.MATRIX,
    "_sum_of_products": OpClass.MATRIX,
    "aten::native_layer_norm_backward": OpClass.FUSED,
    "aten::gelu": OpClass.FUSED,
    "aten::add_": OpClass.FUSED,
    "aten::embedding_dense_backward": OpClass.EMBEDDING,
    "aten::copy_": OpClass.COPIES,
    "aten::_fused_adamw_": OpClass.OPTIMIZER,
    "_adamw": OpClass.OPTIMIZER,
    "_cross_entropy_rows": OpClass.HEAD,
    "aten::_foreach_norm": OpClass.OPTIMIZER,
    "aten::view": OpClass.OTHER,
    "autograd::engine::evaluate_function: MmBackward0": OpClass.OTHER,
    "a kernel nobody has heard of": OpClass.OTHER,
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_the_name_tells_the_class(name: str, kind: OpClass) -> None:
    assert op_class(name, phase=StepPhase.FORWARD) is kind


def test_element_wise_work_of_the_update_is_the_optimizers() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>"
    assert op_class(name, phase=StepPhase.UPDATE) is OpClass.OPTIMIZER
    assert op_class("nvjet_tst_128x256", phase=StepPhase.UPDATE) is OpClass.MATRIX
    assert op_class("a kernel nobody has heard of", phase=StepPhase.UPDATE) is OpClass.OTHER


def span(name: str, begin: float, end: float, *, cat: str, tid: int = 1, **args: Any) -> dict:
    event = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid}
    return {**event, "args": args}


def mark(name: str, begin: float, end: float) -> dict:
    return span(f"gristmill::{name}", begin, end, cat="user_annotation")


def launch(number: int, at: float, *, tid: int = 1) -> dict:
    return span("cudaLaunchKernel", at, at + 1, cat="cuda_runtime", tid=tid, correlation=number)


def kernel(name: str, number: int, begin: float, end: float) -> dict:
    return span(name, begin, end, cat="kernel", tid=7, correlation=number)


STEP = [
    mark("data", 0, 10),
    mark("forward", 10, 100),
    mark("backward", 100, 200),
    mark("update", 200, 300),
    mark("records", 220, 230),
    mark("records", 240, 250),
    mark("records", 300, 310),
]


def test_kernels_belong_to_the_phase_that_launched_them() -> None:
    trace = read_trace(
        [
            *STEP,
            {"ph": "M", "name": "process_name"},
            launch(1, 20),
            launch(2, 110, tid=2),  # autograd has a thread of its own
            launch(3, 260),  # after both records inside the update
            launch(4, 245),
            kernel("nvjet_tst_1", 1, 1000, 1400),
            kernel("flash_bwd", 2, 1400, 2000),
            kernel("multi_tensor_apply_kernel", 3, 2100, 2200),
            kernel("direct_copy_kernel", 4, 2200, 2250),
            kernel("unknown", 99, 2250, 2300),
        ],
        on_gpu=True,
    )
    assert [(one.phase, one.kind, round(1e6 * one.seconds)) for one in trace.ops] == [
        (StepPhase.FORWARD, OpClass.MATRIX, 400),
        (StepPhase.BACKWARD, OpClass.ATTENTION, 600),
        (StepPhase.UPDATE, OpClass.OPTIMIZER, 100),
        (StepPhase.RECORDS, OpClass.COPIES, 50),
        (StepPhase.OTHER, OpClass.OTHER, 50),
    ]
    assert trace.busy == pytest.approx(1200e-6)


def test_time_of_overlapping_kernels_counts_once() -> None:
    trace = read_trace(
        [*STEP, launch(1, 20), launch(2, 22), kernel("a", 1, 0, 100), kernel("b", 2, 50, 130)],
        on_gpu=True,
    )
    assert [round(1e6 * one.seconds) for one in trace.ops] == [100, 30]


def test_all_that_the_loss_launches_is_the_heads() -> None:
    loss = span("gristmill::linear_cross_entropy", 30, 60, cat="cpu_op")
    events = [*STEP, loss, launch(1, 40), launch(2, 70)]
    events += [kernel("nvjet_1", 1, 100, 200), kernel("nvjet_2", 2, 200, 250)]
    head, plain = read_trace(events, on_gpu=True).ops
    assert (head.kind, plain.kind) == (OpClass.HEAD, OpClass.MATRIX)


def test_operators_of_the_cpu_do_not_count_those_inside() -> None:
    trace = read_trace(
        [
            *STEP,
            span("aten::linear", 20, 60, cat="cpu_op"),
            span("aten::addmm", 25, 55, cat="cpu_op"),
            span("aten::mm", 120, 190, cat="cpu_op"),
            span("aten::mm", 0, 300, cat="cpu_op", tid=5),  # another thread, at the same time
        ],
        on_gpu=False,
    )
    times = {(one.name, one.phase): round(1e6 * one.seconds) for one in trace.ops}
    assert times["aten::linear", StepPhase.FORWARD] == 10
    assert times["aten::addmm", StepPhase.FORWARD] == 30
    assert times["aten::mm", StepPhase.BACKWARD] == 70
    assert times["(between operators)", StepPhase.FORWARD] == 90 - 40
    assert trace.seconds == pytest.approx(310e-6)
    assert trace.busy == pytest.approx(310e-6)
    assert sum(trace.host.values()) == pytest.approx(310e-6)
    assert trace.host[StepPhase.RECORDS] == pytest.approx(30e-6)
    assert trace.host[StepPhase.UPDATE] == pytest.approx(80e-6)
