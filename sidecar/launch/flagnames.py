"""The names of all launch flags of SGLang, by release: what argparse compares an abbreviation with.

Read from the sources of the releases; a ``--no-...`` that argparse adds by itself is not among them.
"""

from __future__ import annotations

from functools import cache
from typing import Final

_CHANGES: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "0.4.6.post5",
        (
            "allow-auto-truncate api-key attention-backend base-gpu-id bucket-e2e-request-latency "
            "bucket-inter-token-latency bucket-time-to-first-token chat-template chunked-prefill-size "
            "collect-tokens-histogram completion-template constrained-json-whitespace-pattern context-length "
            "cpu-offload-gb cuda-graph-bs cuda-graph-max-bs data-parallel-size debug-tensor-dump-inject "
            "debug-tensor-dump-input-file debug-tensor-dump-output-folder decode-log-interval deepep-config "
            "deepep-mode delete-ckpt-after-loading device disable-chunked-prefix-cache disable-cuda-graph "
            "disable-cuda-graph-padding disable-custom-all-reduce disable-fast-image-processor "
            "disable-outlines-disk-cache disable-overlap-schedule disable-radix-cache "
            "disaggregation-bootstrap-port disaggregation-ib-device disaggregation-mode "
            "disaggregation-transfer-backend dist-init-addr dist-timeout download-dir dp-size "
            "ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num "
            "ds-sparse-decode-threshold dtype enable-cache-report enable-custom-logit-processor enable-deepep-moe "
            "enable-double-sparsity enable-dp-attention enable-dp-lm-head enable-ep-moe enable-eplb "
            "enable-expert-distribution-metrics enable-flashinfer-mla enable-flashmla enable-hierarchical-cache "
            "enable-memory-saver enable-metrics enable-mixed-chunk enable-multimodal enable-nan-detection "
            "enable-nccl-nvls enable-p2p-check enable-request-time-stats-logging enable-tokenizer-batch-encode "
            "enable-torch-compile ep-dispatch-algorithm ep-num-redundant-experts ep-size "
            "eplb-rebalance-num-iterations expert-distribution-recorder-buffer-size "
            "expert-distribution-recorder-mode expert-parallel-size file-storage-path "
            "flashinfer-mla-disable-ragged gpu-id-step grammar-backend hicache-ratio hicache-size "
            "hicache-write-policy host init-expert-location is-embedding json-model-override-args kv-cache-dtype "
            "kv-events-config load-balance-method load-format log-level log-level-http log-requests "
            "log-requests-level lora-backend lora-paths max-loras-per-batch max-micro-batch-size "
            "max-prefill-tokens max-running-requests max-total-tokens mem-fraction-static mm-attention-backend "
            "model-path moe-dense-tp-size n-share-experts-fusion nccl-init-addr nnodes node-rank "
            "num-continuous-decode-steps page-size pdlb-url pipeline-parallel-size port pp-size "
            "preferred-sampling-params quantization quantization-param-path random-seed reasoning-parser revision "
            "sampling-backend schedule-conservativeness schedule-policy served-model-name show-time-cost "
            "skip-tokenizer-init speculative-accept-threshold-acc speculative-accept-threshold-single "
            "speculative-algorithm speculative-draft-model-path speculative-eagle-topk "
            "speculative-num-draft-tokens speculative-num-steps speculative-token-map stream-interval "
            "stream-output tensor-parallel-size tokenizer-mode tokenizer-path tool-call-parser "
            "torch-compile-max-bs torchao-config tp-size triton-attention-num-kv-splits "
            "triton-attention-reduce-in-fp32 trust-remote-code warmups watchdog-timeout"
        ),
        "",
    ),
    (
        "0.4.10.post2",
        (
            "crash-dump-folder custom-weight-loader debug-tensor-dump-prefill-only decode-attention-backend "
            "disable-hybrid-swa-memory disable-shared-experts-fusion disaggregation-decode-dp "
            "disaggregation-decode-tp disaggregation-prefill-pp enable-cudagraph-gc "
            "enable-flashinfer-allreduce-fusion enable-flashinfer-cutlass-moe enable-flashinfer-trtllm-moe "
            "enable-lora enable-metrics-for-all-schedulers enable-mscclpp enable-pdmux enable-profile-cuda-graph "
            "enable-return-hidden-states enable-symm-mem enable-triton-kernel-moe enable-two-batch-overlap ep "
            "eplb-algorithm eplb-rebalance-layers-per-chunk hicache-io-backend hicache-mem-layout "
            "hicache-storage-backend hybrid-kvcache-ratio lora-target-modules max-loaded-loras max-lora-rank "
            "max-queued-requests model model-impl model-loader-extra-config moe-a2a-backend nccl-port "
            "num-reserved-decode-tokens prefill-attention-backend skip-server-warmup sleep-on-idle sm-group-num "
            "swa-full-tokens-ratio weight-loader-disable-mmap"
        ),
        "enable-flashinfer-mla enable-flashmla n-share-experts-fusion",
    ),
    (
        "0.5.2",
        (
            "disable-flashinfer-cutlass-moe-fp4-allgather enable-flashinfer-mxfp4-moe enable-lmcache "
            "eplb-min-rebalancing-utilization-threshold flashinfer-mxfp4-moe-precision gc-warning-threshold-secs "
            "generation-tokens-buckets hicache-storage-backend-extra-config hicache-storage-prefetch-policy "
            "mamba-ssm-dtype max-mamba-cache-size moe-runner-backend numa-node offload-group-size offload-mode "
            "offload-num-in-group offload-prefetch-step prefill-round-robin-balance prompt-tokens-buckets "
            "scheduler-recv-interval speculative-attention-mode speculative-draft-model "
            "speculative-draft-model-revision tbo-token-distribution-threshold tokenizer-worker-num tool-server "
            "weight-version"
        ),
        "pdlb-url",
    ),
    (
        "0.5.3.post3",
        (
            "config constrained-json-disable-any-whitespace crash-on-nan "
            "disaggregation-decode-enable-offload-kvcache disaggregation-decode-polling-interval "
            "dynamic-batch-tokenizer-batch-size dynamic-batch-tokenizer-batch-timeout elastic-ep-backend "
            "enable-beta-spec enable-deterministic-inference enable-dynamic-batch-tokenizer "
            "enable-flashinfer-cutedsl-moe enable-fp32-lm-head enable-piecewise-cuda-graph "
            "enable-priority-scheduling enable-single-batch-overlap enable-torch-symm-mem enable-trace "
            "enable-weights-cpu-backup grpc-mode keep-mm-feature-on-device load-watch-interval "
            "lora-eviction-policy mamba-full-memory-ratio max-lora-chunk-size modelopt-checkpoint-restore-path "
            "modelopt-checkpoint-save-path modelopt-quant mooncake-ib-device multi-item-scoring-delimiter "
            "nsa-decode nsa-prefill oltp-traces-endpoint pdmux-config-path piecewise-cuda-graph-max-tokens "
            "piecewise-cuda-graph-tokens pp-max-micro-batch-size priority-scheduling-preemption-threshold "
            "radix-eviction-policy remote-instance-weight-loader-seed-instance-ip "
            "remote-instance-weight-loader-seed-instance-service-port "
            "remote-instance-weight-loader-send-weights-group-ports sampling-defaults "
            "schedule-low-priority-values-first speculative-draft-load-format speculative-ngram-branch-length "
            "speculative-ngram-capacity speculative-ngram-match-type speculative-ngram-max-bfs-breadth "
            "speculative-ngram-max-match-window-size speculative-ngram-min-bfs-breadth "
            "speculative-ngram-min-match-window-size tokenizer-metrics-allowed-custom-labels "
            "tokenizer-metrics-custom-labels-header triton-attention-split-tile-size"
        ),
        "debug-tensor-dump-prefill-only max-micro-batch-size",
    ),
    (
        "0.5.4.post3",
        (
            "abort-on-priority-when-disabled checkpoint-engine-wait-weights-before-ready debug-tensor-dump-layers "
            "decrypted-config-file decrypted-draft-config-file disable-tokenizer-batch-decode kt-amx-method "
            "kt-amx-weight-path kt-cpuinfer kt-num-gpu-experts kt-threadpool-count mm-max-concurrent-calls "
            "mm-per-request-timeout modelopt-export-path nsa-decode-backend nsa-prefill-backend "
            "otlp-traces-endpoint piecewise-cuda-graph-compiler quantize-and-serve rl-on-policy-target "
            "speculative-moe-runner-backend"
        ),
        (
            "crash-on-nan enable-beta-spec enable-deepep-moe enable-ep-moe enable-flashinfer-cutedsl-moe "
            "enable-flashinfer-cutlass-moe enable-flashinfer-mxfp4-moe enable-flashinfer-trtllm-moe "
            "enable-triton-kernel-moe nsa-decode nsa-prefill oltp-traces-endpoint"
        ),
    ),
    (
        "0.5.6.post2",
        (
            "dllm-algorithm dllm-algorithm-config enable-attn-tp-input-scattered "
            "enable-broadcast-mm-inputs-process enable-draft-weights-cpu-backup enable-flashinfer-autotune "
            "enable-fused-qk-norm-rope enable-layerwise-nvtx-marker enable-nsa-prefill-context-parallel "
            "enable-torch-compile-debug-mode export-metrics-to-file export-metrics-to-file-dir fastapi-root-path "
            "forward-hooks fp8-gemm-backend kt-max-deferred-experts-per-token kt-method kt-weight-path "
            "mm-enable-dp-encoder mm-process-config rl-quant-profile speculative-moe-a2a-backend"
        ),
        "kt-amx-method kt-amx-weight-path",
    ),
    (
        "0.5.9",
        (
            "admin-api-key attention-context-parallel-size attn-cp-size custom-sigquit-handler "
            "disable-flashinfer-autotune disable-hicache-numa-detect enable-dynamic-chunking "
            "enable-lora-overlap-loading enable-multi-layer-eagle enable-precise-embedding-interpolation "
            "enable-prefill-delayer enable-prefix-mm-cache enable-return-routed-experts encoder-only "
            "encoder-transfer-backend encoder-urls extra-metric-labels fp4-gemm-backend hf-chat-template-name "
            "hierarchical-sparse-attention-extra-config language-only limit-mm-data-per-request "
            "log-requests-format log-requests-target mamba-backend mamba-scheduler-strategy mamba-track-interval "
            "model-checksum moe-data-parallel-size moe-dp-size nsa-prefill-cp-mode pp-async-batch-depth "
            "prefill-delayer-forward-passes-buckets prefill-delayer-max-delay-passes "
            "prefill-delayer-token-usage-low-watermark prefill-delayer-wait-seconds-buckets prefill-max-requests "
            "remote-instance-weight-loader-backend remote-instance-weight-loader-start-seed-via-transfer-engine "
            "soft-watchdog-timeout speculative-draft-attention-backend speculative-draft-model-quantization "
            "uvicorn-access-log-exclude-prefixes"
        ),
        "enable-flashinfer-autotune load-watch-interval",
    ),
    (
        "0.5.10.post1",
        (
            "default-priority-value disable-piecewise-cuda-graph disable-priority-preemption "
            "enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion enable-elastic-expert-backup "
            "enable-fused-moe-sum-all-reduce enable-hisparse enable-mfu-metrics enable-mm-global-cache "
            "enable-prefill-context-parallel enable-ssl-refresh enable-streaming-session "
            "enforce-disable-flashinfer-allreduce-fusion enforce-piecewise-cuda-graph engine-info-bootstrap-port "
            "experts-shared-outer-loras gc-threshold hisparse-config incremental-streaming-output "
            "linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend modelexpress-config "
            "pre-warm-nccl prefill-cp-mode speculative-ngram-max-trie-depth ssl-ca-certs ssl-certfile ssl-keyfile "
            "ssl-keyfile-password stream-response-default-include-usage use-ray"
        ),
        (
            "disable-hicache-numa-detect disaggregation-decode-dp disaggregation-decode-tp "
            "disaggregation-prefill-pp hierarchical-sparse-attention-extra-config mm-max-concurrent-calls "
            "mm-per-request-timeout speculative-ngram-branch-length speculative-ngram-max-match-window-size "
            "speculative-ngram-min-match-window-size"
        ),
    ),
    (
        "0.5.12.post1",
        (
            "batch-notify-size debug-cuda-graph detokenizer-worker-num disaggregation-decode-enable-radix-cache "
            "elastic-ep-rejoin enable-breakable-cuda-graph enable-deepep-waterfill "
            "enable-dp-attention-local-control-broadcast enable-forward-pass-metrics enable-http2 enable-mis "
            "enable-quant-communications enable-return-indexer-topk enable-strict-thinking "
            "enforce-shared-experts-fusion forward-pass-metrics-ipc-name forward-pass-metrics-worker-id "
            "grpc-http-sidecar-port hierarchical-sparse-attention-extra-config lora-drain-wait-threshold "
            "lora-strict-loading lora-use-virtual-experts model-config-parser msprobe-dump-config "
            "prefill-delayer-max-delay-ms prefill-delayer-queue-min-ratio prefill-only-disable-kv-cache "
            "record-nolora-graph speculative-adaptive speculative-adaptive-config speculative-dflash-block-size "
            "speculative-dflash-draft-window-size speculative-draft-window-size "
            "speculative-ngram-external-corpus-max-tokens speculative-ngram-external-corpus-path "
            "speculative-ngram-external-sam-budget speculative-skip-dp-mlp-sync strip-thinking-cache "
            "tokenizer-backend weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints "
            "weight-loader-prefetch-num-threads"
        ),
        (
            "ds-channel-config-path ds-heavy-channel-num ds-heavy-channel-type ds-heavy-token-num "
            "ds-sparse-decode-threshold enable-double-sparsity multi-item-scoring-delimiter"
        ),
    ),
    (
        "0.5.15",
        (
            "asr-max-buffer-seconds asr-max-concurrent-sessions bf16-gemm-backend cp-strategy "
            "cuda-graph-backend-decode cuda-graph-backend-prefill cuda-graph-bs-decode cuda-graph-bs-prefill "
            "cuda-graph-config cuda-graph-max-bs-decode cuda-graph-max-bs-prefill cuda-graph-tc-compiler dcp-size "
            "decode-context-parallel-size decoupled-spec-bind-endpoint decoupled-spec-connect-endpoints "
            "decoupled-spec-rank decoupled-spec-role deepep-dispatcher-output-dtype disable-attn-tp-gather "
            "disable-decode-cuda-graph disable-prefill-cuda-graph disaggregation-decode-extra-slots "
            "dsa-decode-backend dsa-paged-mqa-logits-backend dsa-prefill-backend dsa-prefill-cp-mode "
            "dsa-topk-backend enable-deepseek-v4-fp4-indexer enable-dsa-prefill-context-parallel "
            "enable-int8-mamba-checkpoint enable-linear-replayssm enable-mamba-cache-stochastic-rounding "
            "enable-page-major-kv-layout enable-prefill-cp enable-session-radix-cache enable-tf32-matmul "
            "enable-unified-memory encoder-bootstrap-port encoder-register-urls "
            "flashinfer-allreduce-fusion-backend int8-mamba-ckpt-size kv-canary kv-canary-real-data "
            "kv-canary-sweep-interval linear-replayssm-cache-len lmcache-config-file "
            "load-snapshot-publish-interval mamba-cache-philox-rounds mamba-radix-cache-strategy "
            "min-free-slots-delay optimistic-prefill-retries radix-cache-backend spec-trace-dir "
            "speculative-use-rejection-sampling trace-modules"
        ),
        (
            "custom-sigquit-handler debug-tensor-dump-inject enable-nan-detection enable-piecewise-cuda-graph "
            "hybrid-kvcache-ratio record-nolora-graph"
        ),
    ),
    (
        "0.5.16",
        (
            "default-chat-template-kwargs dllm-fdfo elastic-ep-initial-size elastic-ep-join-mode "
            "elastic-ep-join-rank-offset elastic-ep-scale-timeout enable-dsa-cache-layer-split enable-flexkv "
            "enable-gdn-replayssm-spec enable-scattered-sconv enable-waterfill flexkv-config-file fuseep-mode "
            "grpc-port max-ep-size mm-feature-transport optimistic-prefill-attempts retraction-policy sidecar "
            "sidecar-args smg-grpc-mode smg-http-sidecar-port "
            "speculative-dspark-align-verify-tokens-to-graph-tier speculative-dspark-block-size "
            "speculative-dspark-confidence-sts-path speculative-dspark-sps-table-path"
        ),
        "enable-deepep-waterfill optimistic-prefill-retries",
    ),
    (
        "0.5.18",
        (
            "allowed-media-domains c128-page-size custom-sigquit-handler dcp-comm-backend dcp-replicate-q-proj "
            "disaggregation-decode-retraction-backup dwdp-size enable-cp-decode-attn-tp "
            "enable-linear-replayssm-spec enable-tp-lm-head-all-to-all expert-balancedness-report-mode "
            "flashinfer-autotune-skip-ops http2-max-concurrent-streams image-processor-backend "
            "language-model-only linear-attn-verify-backend mamba-max-states-per-path media-url-max-file-size-mb "
            "mlx-enable-sampling mm-global-cache-backend mm-io-worker-num mm-preprocess-cache-size-mb "
            "mm-processor-worker-num return-hidden-states-mode speculative-draft-kv-cache-dtype "
            "startup-weight-load-mode stat-loggers trust-mm-content-hashes weight-cache-mode weight-cache-socket "
            "weight-cache-timeout"
        ),
        "torchao-config",
    ),
    (
        "0.5.20",
        (
            "deepep-v2-mode dsv4-attn-backend dsv4-prefill-backend enable-dense-mlp-attn-tp enable-layernorm-sp "
            "enable-lean-attention enable-response-store enable-shared-experts-attn-tp "
            "enable-unified-cache-external-linker enable-w4a4-mxfp4-megamoe flashinfer-a2a-dispatch-type "
            "gated-launch-port hicache-host-memory-mode hicache-storage-prefetch-retry-max-attempts "
            "hicache-storage-prefetch-retry-poll-interval http2-initial-connection-window-size "
            "load-publish-endpoint ple-offload-backend ple-offload-dir ple-offload-embedding "
            "prefill-decode-interval radix-eviction-policy-config return-input-ids return-output-ids "
            "sampling-mask-max-tokens speculative-domino-candidate-pool-size speculative-dsa-topk-backend "
            "unified-cache-external-linker-backend uno-lora-path"
        ),
        (
            "collect-tokens-histogram cuda-graph-bs cuda-graph-max-bs custom-sigquit-handler "
            "disable-piecewise-cuda-graph dsa-prefill-cp-mode enable-breakable-cuda-graph "
            "enable-dsa-prefill-context-parallel enable-expert-distribution-metrics enable-gdn-replayssm-spec "
            "enable-nsa-prefill-context-parallel enable-prefill-context-parallel enforce-piecewise-cuda-graph "
            "mamba-scheduler-strategy nsa-decode-backend nsa-prefill-backend nsa-prefill-cp-mode "
            "piecewise-cuda-graph-compiler piecewise-cuda-graph-max-tokens piecewise-cuda-graph-tokens "
            "prefill-cp-mode prefill-round-robin-balance speculative-dflash-draft-window-size stat-loggers "
            "stream-output"
        ),
    ),
    (
        "0.5.23",
        (
            "attention-data-parallel-size attn-dp-size boundary-reduction constrained-json-max-whitespace-cnt "
            "context-bucket cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context "
            "disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill "
            "disaggregation-decode-allocation-policy disaggregation-decode-host-receive-threshold "
            "disaggregation-enable-kv-checksum dsa-triton-union enable-amd-monokernel "
            "enable-decoder-swa-bounded-replay enable-dsa-fused-indexer enable-encoder-swa-bounded-replay "
            "enable-hicache enable-http-worker-reuseport enable-kv-cache-sharding enable-linker-mla-dedup "
            "enable-megamoe-for-layernorm-sp enable-nvidia-megakernel enable-paged-experts enable-pd-role-switch "
            "enable-return-aux-hidden-states enable-watermark grpc-response-timeout-secs "
            "hicache-host-memory-fraction monokernel-backend otlp-service-name paged-experts-num-resident "
            "prefill-decode-interval-min-bs prefill-kv-cache-dequant-dtype qsa-indexer-dtype "
            "return-aux-hidden-state-layer-ids shared-experts-tp-size speculative-draft-sink-size "
            "speculative-enable-w4a4-mxfp4-megamoe speculative-use-block-verification swa-prefix-tails "
            "trust-request-chat-template unified-cache-external-linker-config watermark-config"
        ),
        "cuda-graph-tc-compiler elastic-ep-rejoin keep-mm-feature-on-device speculative-skip-dp-mlp-sync",
    ),
)
"""A release, the flags that came with it, and those that went; without their dashes."""

RELEASES: Final = tuple(release for release, _, _ in _CHANGES)
"""The releases that were read, oldest first."""


@cache
def names(release: str) -> frozenset[str]:
    """The flags of one of `RELEASES`, with their dashes."""
    found: set[str] = set()
    for version, came, went in _CHANGES:
        found = (found - set(went.split())) | set(came.split())
        if version == release:
            break
    return frozenset(f"--{name}" for name in found)


def matching(word: str, release: str) -> tuple[str, ...]:
    """The flags of one of `RELEASES` that a word may stand for: itself alone, or all that it abbreviates."""
    known = names(release)
    return (word,) if word in known else tuple(sorted(name for name in known if name.startswith(word)))
