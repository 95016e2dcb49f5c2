"""The one table of kernel names: communication is never missed and never made up, the rest lands in its class."""

from __future__ import annotations

import pytest

from traceanalyzer.kernel_names import classify, library_of

# name: operation. What moves data between devices.
COMMUNICATION: dict[str, str | None] = {
    # NCCL before 2.19, after, symmetric memory, and before 2.5
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)": "all_reduce",
    "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "send_recv",
    "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclKernel_ReduceScatter_TREE_LL128_Max_half(ncclDevComm*, unsigned long, ncclWork*)": "reduce_scatter",
    "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "broadcast",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclDevKernel_AllGatherV_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "all_gather",
    "ncclSymDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymDevArgs)": "all_reduce",
    "ncclAllReduceRingLLKernel_sum_f16(ncclColl)": "all_reduce",
    "void ncclAllGatherRingLLKernel_copy_i8(ncclColl)": "all_gather",
    # generic: communication of an unknown operation
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": None,
    "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)": None,
    "void rcclGenericKernel<1, false>(ncclDevComm*, unsigned long, ncclWork*)": None,
    "void mscclKernel_Sum_half_Simple(ncclDevComm*)": None,
    # other libraries
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned long)": "all_reduce",
    "void c10d::symmetric_memory::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)": "all_reduce",
    "void two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)": "all_reduce",
    "void multimem_all_gather_kernel<8, 16>(char const*, char*)": "all_gather",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)": "all_reduce",
    "void sglang::cross_device_reduce_2stage<half, 4>(RankData*)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(AllReduceParams)": "all_reduce",
    "void flashinfer::allreduce_fusion_kernel_oneshot_lamport<4, 8>(AllReduceFusionParams)": "all_reduce",
    "void deep_ep::internode::dispatch<false, 8>(int4*, float*)": "all_to_all",
    "void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>(__nv_bfloat16*)": "all_to_all",
    "void deep_ep::internode_ll::dispatch<true, false, 7168>(void*)": "all_to_all",
    "void deep_ep::intranode::notify_dispatch<8>(int const*)": None,
    "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int)": "reduce_scatter",
    "void userbuffers_fp16_sum_inplace_gpu_rr_ag<8>(int)": "all_gather",
    "kuserbuffers_pushsend(int*, int*, int4*)": "send_recv",
    "void kuserbuffers_pullrecv(int, int, int*)": None,
    "nvshmemi_proxy_kernel(int)": None,
    "void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16*, c10::BFloat16*)": "all_reduce",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__hip_bfloat16>>(int)": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<4, 8>(Params)": "all_reduce",
    "void moereduce_allreduce_fusion_kernel_oneshot_lamport<__nv_bfloat16, 8>(Params)": "all_reduce",
    "void mscclpp::collective::allreducePacket<float>(float*, float*)": None,
}  # fmt: skip

# What only looks like it, and every other class.
COMPUTE = {
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)": "reduction",
    "triton_poi_fused_all_reduce_hint_add_0": "elementwise",
    "void moe_all_to_all_permute_kernel<__nv_bfloat16>(int const*)": "moe",
    "void deep_ep::layout::get_dispatch_layout<256>(long const*, int*)": "moe",
    "void my_ncclKernelLike_copy(int)": "other",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas": "gemm",
    "nvjet_tst_192x8_64x8_4x1_v_bz_TNT": "gemm",
    "Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x64x32_MI32x32x1_SN": "gemm",
    "void cutlass::Kernel<cutlass_70_wmma_tensorop_f16_s161616gemm_f16_32x32_64x2_tn_align8>(Params)": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, true, false>(float)": "gemm",
    "triton_tem_fused_mm_3": "gemm",
    "triton_tem_fused__to_copy_addmm_view_0": "gemm",
    "void transformer_engine::grouped_gemm_kernel<2>(int)": "grouped_gemm",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>(Flash_fwd_params)": "attention",
    "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext": "attention",
    "void cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma(int)": "attention",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)": "norm",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16>>(Params)": "norm",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float>>()":
        "optimizer",
    "void apex::multi_tensor_lamb_stage_1(int)": "optimizer",
    "void adam_kernel<float>(float*)": "optimizer",
    # a lambda is no LAMB: these were taken for the optimizer's
    "void at::native::vectorized_elementwise_kernel<4, at::native::cos_kernel_cuda(at::TensorIteratorBase&)::{lambda()#1}>()":
        "elementwise",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, sum_functor()::{lambda(float, float)#1}>>(float)":
        "reduction",
    # FBGEMM is where embedding kernels live: no product
    "void split_embedding_codegen_forward_unweighted_kernel<float>(fbgemm_gpu::FixedDivisor)": "embedding",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::Half, long, unsigned int, 2, 2, -2, true>()":
        "embedding",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": "elementwise",
    "void tensorrt_llm::kernels::quantize_with_block_size<2, __nv_bfloat16>(flashinfer::QuantizationSFLayout)": "other",
    "triton_red_fused__log_softmax_arange_expand_mm_backward_0": "reduction",
    "void moe::dev::routing::routingIndicesHistogramKernel<int>(int)": "moe",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*)": "reduction",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 3, 64, 64>(float*)": "elementwise",
    "triton_poi_fused_add_mul_5": "elementwise",
    "void cub::DeviceScanKernel<cub::AgentScanPolicy<128, 15, int>>(int)": "other",
    "": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMUNICATION)
def test_communication_and_its_operation(name: str) -> None:
    assert classify(name) == ("comm", COMMUNICATION[name])


@pytest.mark.parametrize("name", COMPUTE)
def test_everything_else_has_a_class_and_no_operation(name: str) -> None:
    assert classify(name) == (COMPUTE[name], None)


LIBRARIES = {
    "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)": "NCCL",
    "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)": "NCCL",
    "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)": "NCCL",
    "void rcclGenericKernel<1, false>(ncclDevComm*, unsigned long, ncclWork*)": "RCCL",
    "void mscclKernel_Sum_half_Simple(ncclDevComm*)": "MSCCL",
    "void mscclpp::collective::allreducePacket<float>(float*, float*)": "MSCCL",
    "void deep_ep::intranode::notify_dispatch<8>(int const*)": "DeepEP",
    "void deep_ep::internode_ll::combine<true, 7168>(void*)": "DeepEP",
    "void two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)": "symmetric memory",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(RankData*)": "custom all-reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>(AllReduceParams)": "TensorRT-LLM/FlashInfer",
    "void userbuffers_fp16_sum_inplace_gpu_rr_ag<8>(int)": "userbuffers",
    "nvshmemi_proxy_kernel(int)": "NVSHMEM",
    "Memcpy PtoP (Device -> Device)": "copy engine",
    # within one device, or to the host
    "Memcpy DtoD (Device -> Device)": None,
    "Memcpy HtoD (Pinned -> Device)": None,
    "void deep_ep::layout::get_dispatch_layout<256>(long const*, int*)": None,
    "nvjet_tst_192x8_64x8_4x1_v_bz_TNT": None,
    "void horovod::common::batched_memcpy_k<1024>(BatchedD2DParams)": None,
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_whose_communication_it_is(name: str) -> None:
    assert library_of(name) == LIBRARIES[name]


def test_every_communication_kernel_has_a_library() -> None:
    assert [name for name in COMMUNICATION if library_of(name) is None] == []
    assert [name for name in COMPUTE if library_of(name) is not None] == []
