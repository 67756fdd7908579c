// The yardstick of scripts/benchmark_rope_pack.py: the pack of docs/qk_norm_rope_pack.md by the
// scheme that others have published for it. Half a warp takes one head of 128 bfloat16 values,
// 16 bytes a lane; 128 threads a block, 8 heads; indices of 32 bits; one launch. Batch 1, dense
// tensors. No headers, so that NVRTC needs none.

struct Head {
    float value[8];
};

__device__ __forceinline__ float low_half(unsigned int pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_half(unsigned int pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

// Two floats to bfloat16, to nearest even: `low` in the lower half, as it lies in memory.
__device__ __forceinline__ unsigned int round_pair(float low, float high) {
    unsigned int pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));

    return pair;
}

__device__ __forceinline__ Head unpack(uint4 bits) {
    return {{low_half(bits.x), high_half(bits.x), low_half(bits.y), high_half(bits.y),
             low_half(bits.z), high_half(bits.z), low_half(bits.w), high_half(bits.w)}};
}

// The norm and the rotation of a head, of which this lane has 8 neighbours, rounded where
// PyTorch's chain rounds and added in its order: groups of 4 from the left, then halves.
__device__ __forceinline__ uint4 norm_and_rotate(
    uint4 bits, uint4 weight_bits, const float4 *rope, unsigned int half_warp, float eps) {
    Head head = unpack(bits);
    Head weight = unpack(weight_bits);
    float sums[2];

    for (int group = 0; group < 2; ++group) {
        const float *x = head.value + 4 * group;
        float sum = __fadd_rn(__fmul_rn(x[0], x[0]), __fmul_rn(x[1], x[1]));
        sum = __fadd_rn(sum, __fmul_rn(x[2], x[2]));
        sums[group] = __fadd_rn(sum, __fmul_rn(x[3], x[3]));
    }

    for (int distance = 8; distance > 0; distance /= 2) {
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(half_warp, sums[0], distance));
        sums[1] = __fadd_rn(sums[1], __shfl_xor_sync(half_warp, sums[1], distance));
    }

    float mean = __fmul_rn(__fadd_rn(sums[0], sums[1]), 1.0f / 128.0f);
    float inverse_root = rsqrtf(__fadd_rn(mean, eps));
    float4 tables[2] = {rope[0], rope[1]};
    unsigned int result[4];

    for (int pair = 0; pair < 4; ++pair) {
        float cosine = pair % 2 ? tables[pair / 2].z : tables[pair / 2].x;
        float sine = pair % 2 ? tables[pair / 2].w : tables[pair / 2].y;
        unsigned int normalized = round_pair(__fmul_rn(head.value[2 * pair], inverse_root),
                                             __fmul_rn(head.value[2 * pair + 1], inverse_root));
        unsigned int weighted =
            round_pair(__fmul_rn(low_half(normalized), weight.value[2 * pair]),
                       __fmul_rn(high_half(normalized), weight.value[2 * pair + 1]));
        float real = low_half(weighted);
        float imaginary = high_half(weighted);
        result[pair] =
            round_pair(__fmaf_rn(real, cosine, -__fmul_rn(imaginary, sine)),
                       __fmaf_rn(real, sine, __fmul_rn(imaginary, cosine)));
    }

    return make_uint4(result[0], result[1], result[2], result[3]);
}

// Heads lie one behind the other: `q` has tokens x q_heads, `k` and `v` tokens x kv_heads, the
// prefixes prefix x kv_heads, `k_out` and `v_out` both of these. What is done in place is given
// as its own source. `v_rows` is how many heads of `v_out` are written: 0, those of the prefix,
// or all. `eps` is a double because that is what Python's float arrives as.
extern "C" __global__ void __launch_bounds__(128)
    cuda_scheme(const uint4 *q, uint4 *q_out, const uint4 *k, uint4 *k_out, const uint4 *v,
                uint4 *v_out, const uint4 *k_prefix, const uint4 *v_prefix,
                const uint4 *q_weight, const uint4 *k_weight, const float4 *rope, int q_rows,
                int k_rows, int v_rows, int prefix_rows, int q_heads, int kv_heads, double eps) {
    int lane = threadIdx.x % 16;
    int row = blockIdx.x * 8 + threadIdx.x / 16;
    // The lanes of this half of the warp: the other half may be in another branch.
    unsigned int half_warp = 0xffffu << (threadIdx.x & 16);

    if (row < q_rows) {
        int index = row * 16 + lane;
        const float4 *table = rope + (row / q_heads) * 32 + lane * 2;
        q_out[index] =
            norm_and_rotate(q[index], q_weight[lane], table, half_warp, (float)eps);

        return;
    }

    row -= q_rows;

    if (row < k_rows) {
        int index = row * 16 + lane;
        int token_row = row - prefix_rows;

        if (token_row < 0) {
            k_out[index] = k_prefix[index];
        } else {
            const float4 *table = rope + (token_row / kv_heads) * 32 + lane * 2;
            k_out[index] = norm_and_rotate(k[token_row * 16 + lane], k_weight[lane], table,
                                           half_warp, (float)eps);
        }

        return;
    }

    row -= k_rows;

    if (row < v_rows) {
        int index = row * 16 + lane;
        int token_row = row - prefix_rows;
        v_out[index] = token_row < 0 ? v_prefix[index] : v[token_row * 16 + lane];
    }
}
