/* The operations that a step launches in every layer, in C++: allocation, arguments, launch. Their plain implementations, line by line, are
   rows.py and attention.py. They look at their arguments themselves, as the contracts do.

   Two things differ from those and show in no bit: partial sums and their marks are one allocation, and nothing is
   allocated for none. */
#include <memory>
#include <string_view>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace vnext_cuda {
namespace {

/* ---- rows: see rows.py ---- */

constexpr unsigned ROW_THREADS = 256, TOKEN_THREADS = 128, WARP = 32, TOKEN_WARPS = TOKEN_THREADS / WARP;
constexpr int CHUNK_BYTES = 16;

/* Whether every row of all of them is made of aligned chunks. */
int whole(int64_t width, std::initializer_list<const Tensor *> tensors) {
    const int64_t chunk = CHUNK_BYTES / int64_t((*tensors.begin())->element_size());
    for (const Tensor *tensor : tensors)
        if (reinterpret_cast<uintptr_t>(address(*tensor)) % CHUNK_BYTES || tensor->stride(0) % chunk) return 0;
    return width % chunk == 0;
}

void launch_norm(const Tensor &normed, const Tensor *total, const Tensor &x, const Tensor *residual, const Tensor &weight,
                 double eps) {
    const int64_t rows = x.size(0), width = x.size(1);
    if (rows == 0) return;
    const int is_whole = residual ? whole(width, {&x, residual, &normed, total}) : whole(width, {&x, &normed});
    const Scalar scalar = scalar_of(x);
    launch(device_of(x), {Kernel::RMS_NORM, scalar, scalar_of(weight), scalar, 0},
           {{unsigned(rows), 1, 1}, ROW_THREADS, ROW_THREADS / WARP * 4}, address(normed), total ? address(*total) : nullptr,
           address(x), residual ? address(*residual) : nullptr, address(weight), float(eps), int32_t(width),
           int64_t(x.stride(0)), int64_t(residual ? residual->stride(0) : 0), int32_t(is_whole));
}

void expect_rows(const Tensor &x, const Tensor &weight, double eps) {
    require(fits(x, {ANY, ANY}) && is_float(scalar_of(x)) && together(x, {&weight}));
    expect_norm(weight, x.size(1), scalar_of(x), eps);
}

Tensor rms_norm(const Tensor &x, const Tensor &weight, double eps) {
    expect_rows(x, weight, eps);
    const Tensor normed = empty({x.size(0), x.size(1)}, type_of(x), x);
    launch_norm(normed, nullptr, x, nullptr, weight, eps);
    return normed;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor &x, const Tensor &residual, const Tensor &weight, double eps) {
    expect_rows(x, weight, eps);
    require(fits(residual, {x.size(0), x.size(1)}) && type_of(residual) == type_of(x) && together(x, {&residual}));
    const Tensor normed = empty({x.size(0), x.size(1)}, type_of(x), x), total = empty({x.size(0), x.size(1)}, type_of(x), x);
    launch_norm(normed, &total, x, &residual, weight, eps);
    return {normed, total};
}

/* A name of torch's, read once: its handle is given back, which the conversion to std::string leaves out. */
int gate_of(StringHandle name) {
    const char *text = nullptr;
    size_t length = 0;
    check(torch_string_c_str(name, &text));
    check(torch_string_length(name, &length));
    const std::string_view gate_name(text, length);
    const int gate = gate_name == "silu" ? 0 : gate_name == "gelu_tanh" ? 1 : -1;
    check(torch_delete_string(name));
    require(gate >= 0);
    return gate;
}

Tensor gate_and_mul(const Tensor &x, StringHandle gate_name) {
    const int gate = gate_of(gate_name);
    require(fits(x, {ANY, ANY}) && is_float(scalar_of(x)));
    const int64_t rows = x.size(0), width = x.size(1) / 2;
    const Tensor result = empty({rows, width}, type_of(x), x);
    if (rows == 0 || width == 0) return result;
    const int64_t block_bytes = ROW_THREADS * CHUNK_BYTES, row_bytes = width * int64_t(x.element_size());
    const unsigned blocks = unsigned((row_bytes + block_bytes - 1) / block_bytes);
    const Scalar scalar = scalar_of(x);
    launch(device_of(x), {Kernel::GATE_AND_MUL, scalar, scalar, scalar, 0}, {{unsigned(rows), blocks, 1}, ROW_THREADS, 0},
           address(result), address(x), int32_t(width), int64_t(x.stride(0)), int32_t(gate),
           int32_t(whole(width, {&x, &result})));
    return result;
}

bool is_wide(const Maybe &norm) { return norm && scalar_of(*norm) == Scalar::FLOAT32; }

/* qkv [T, (heads + 2 * kv_heads) * D], slots int64 [T], angles float32 [T, R / 2] with R <= D: both or none. */
void expect_turn(const Tensor &qkv, const Maybe &cosine, const Maybe &sine, const Tensor &key_cache, const Tensor &slots) {
    require(fits(qkv, {ANY, ANY}) && is_float(scalar_of(qkv)) && together(key_cache, {&qkv, &slots}));
    const int64_t tokens = qkv.size(0), width = qkv.size(1), kv_heads = key_cache.size(1), head_dim = head_dim_of(key_cache);
    require(width % head_dim == 0 && width / head_dim % kv_heads == 0 && width / head_dim >= 3 * kv_heads);
    require(fits(slots, {tokens}) && type_of(slots) == aoti_torch_dtype_int64());
    require(cosine.has_value() == sine.has_value());
    if (!cosine) return;
    require(fits(*cosine, {tokens, ANY}) && fits(*sine, {tokens, cosine->size(1)}) && 2 * cosine->size(1) <= head_dim);
    require(scalar_of(*cosine) == Scalar::FLOAT32 && scalar_of(*sine) == Scalar::FLOAT32 && together(qkv, {&*cosine, &*sine}));
}

Tensor rotary_kv_write(const Tensor &qkv, const Maybe &q_norm, const Maybe &k_norm, double eps, const Maybe &cosine,
                       const Maybe &sine, const Tensor &key_cache, const Tensor &value_cache, const Tensor &slots,
                       double key_scale, double value_scale) {
    expect_caches(key_cache, value_cache, key_scale, value_scale);
    expect_turn(qkv, cosine, sine, key_cache, slots);
    const int64_t kv_heads = key_cache.size(1), block_size = key_cache.size(2), head_dim = head_dim_of(key_cache);
    for (const Maybe *norm : {&q_norm, &k_norm})
        if (*norm) expect_norm(**norm, head_dim, scalar_of(qkv), eps), require(together(qkv, {&**norm}));
    const int64_t tokens = qkv.size(0), heads_of_all = qkv.size(1) / head_dim, heads = heads_of_all - 2 * kv_heads;
    const Tensor query = empty({tokens, heads, head_dim}, type_of(qkv), qkv);
    if (tokens == 0) return query;
    const Maybe cosines = cosine ? Maybe(dense(*cosine)) : Maybe(), sines = sine ? Maybe(dense(*sine)) : Maybe();
    const Scalar scalar = scalar_of(qkv);
    launch(device_of(qkv), {Kernel::ROTARY_KV_WRITE, scalar, scalar, scalar_of(key_cache), 0},
           {{unsigned(tokens), unsigned(heads_of_all + TOKEN_WARPS - 1) / TOKEN_WARPS, 1}, TOKEN_THREADS,
            unsigned(TOKEN_WARPS * head_dim * 4)},
           address(query), address(key_cache), address(value_cache), address(qkv), address(q_norm), address(k_norm), address(cosines),
           address(sines), address(slots), float(eps), float(key_scale), float(value_scale), int64_t(qkv.stride(0)),
           int32_t(heads), int32_t(kv_heads), int32_t(head_dim), int32_t(block_size), int32_t(cosines ? cosines->size(1) : 0),
           int32_t(is_wide(q_norm)), int32_t(is_wide(k_norm)));
    return query;
}

/* ---- attention: see attention.py ---- */

constexpr int TILE_ROWS = 16, TILE_COLUMNS = 8, WARPS = 4, LARGE_HEAD = 128, KEYS = 32, STAGES = 2, PAD_BYTES = 16;
constexpr int WIDENING_WARPS = 2;
constexpr double LOG2_E = 1.4426950408889634;

enum Planned { NARROW, WIDE, TILES, TOKENS, LIMITS, PARTIALS, MERGES, PLANNED_COUNT };  // as plan.StepPlan

/* What is copied of a cache's row: see attention.stage_bytes. */
int stage_bytes(const Tensor &cache) {
    const int width = int(cache.size(3)), is_coded = scalar_of(cache) == Scalar::INT8;
    const int before = is_coded && width % CHUNK_BYTES ? CHUNK_BYTES - (width & -width) : 0;
    return (width * int(cache.element_size()) + before + CHUNK_BYTES - 1) / CHUNK_BYTES * CHUNK_BYTES;
}

/* What a block of so many tiles needs: see attention.shared_bytes. */
unsigned shared_bytes(const Tensor &query, const Tensor &key_cache, int tiles, bool is_partial) {
    const int head_dim = int(query.size(2)), scalar = int(query.element_size()), cache = int(key_cache.element_size());
    const bool is_float = scalar == 4;
    const int row = head_dim * scalar + PAD_BYTES;
    const int stages = STAGES * 2 * KEYS * (stage_bytes(key_cache) + PAD_BYTES), widened = cache < scalar ? 2 * KEYS * row : 0;
    const int spare = is_float ? TILE_ROWS * KEYS * 4 : 0;
    const int kept = is_partial ? 0 : (head_dim / TILE_COLUMNS * 4 + 4) * int(WARP) * 4;
    const int own = is_float || head_dim > LARGE_HEAD ? TILE_ROWS * row + spare + kept : std::max(TILE_ROWS * row, kept);
    return unsigned(stages + widened + tiles * own);
}

Tensor paged_attention(const Tensor &given, const Tensor &key_cache, const Tensor &value_cache, const Tensor &block_table,
                       const std::vector<Tensor> &plan, int64_t slot_count, bool narrow_is_partial, double scale,
                       int64_t window, double softcap, double key_scale, double value_scale) {
    expect_caches(key_cache, value_cache, key_scale, value_scale);
    require(fits(given, {ANY, ANY, head_dim_of(key_cache)}) && is_float(scalar_of(given)) && together(key_cache, {&given}));
    require(given.size(1) % key_cache.size(1) == 0 && scale > 0 && !(softcap < 0) && plan.size() == PLANNED_COUNT);
    const Tensor query = dense(given);
    const int64_t tokens = query.size(0), heads = query.size(1), head_dim = query.size(2);
    const int64_t kv_heads = key_cache.size(1), block_size = key_cache.size(2);
    const Device device = device_of(query);
    const Tensor output = empty({tokens, heads, head_dim}, type_of(query), query);
    if (plan[LIMITS].size(0) != tokens) check(aoti_torch_zero_(output.get()));
    Maybe partial;  // the values of all slots, then their marks
    if (slot_count) partial = empty({slot_count * heads * (head_dim + 2)}, aoti_torch_dtype_float32(), query);
    float *const values = static_cast<float *>(address(partial));
    float *const marks = values + slot_count * heads * head_dim;
    const Scalar scalar = scalar_of(query), cache = scalar_of(key_cache);
    const Form form{Kernel::PAGED_ATTENTION, scalar, scalar, cache, int(head_dim)};
    const unsigned parts = unsigned((heads / kv_heads + TILE_ROWS - 1) / TILE_ROWS);
    const auto attend = [&](const Tensor &units, int tiles, int warps, bool is_partial) {
        if (units.size(0) == 0) return;
        const unsigned shared = shared_bytes(query, key_cache, tiles, is_partial);
        launch(device, form, {{unsigned(units.size(0)), unsigned(kv_heads), parts}, warps * WARP, shared}, address(output),
               values, marks, address(query), address(key_cache), address(value_cache), address(units),
               address(plan[TILES]), address(plan[TOKENS]), address(plan[LIMITS]), address(plan[PARTIALS]),
               address(block_table), int64_t(block_table.stride(0)), int32_t(heads), int32_t(kv_heads), int32_t(block_size),
               int32_t(window), float(scale * key_scale * LOG2_E), float(softcap * LOG2_E), float(value_scale));
    };
    const int wide = head_dim <= LARGE_HEAD ? WARPS : WARPS / 2;
    attend(plan[WIDE], wide, wide, false);
    attend(plan[NARROW], 1, cache != scalar ? WIDENING_WARPS : 1, narrow_is_partial);
    if (const int64_t merges = plan[MERGES].size(0))
        launch(device, {Kernel::MERGE_SPLITS, scalar, scalar, cache, int(head_dim)},
               {{unsigned(merges), unsigned(heads), 1}, unsigned(head_dim), 0}, address(output), values, marks,
               address(plan[MERGES]), int32_t(heads), float(value_scale));
    return output;
}

/* ---- the dispatcher ---- */

using Library = torch::stable::detail::StableLibrary;
std::unique_ptr<Library> libraries[DEVICE_TYPES];

}  // namespace

void register_operations(DeviceType type) {
    const char *key = type == DeviceType::CUDA ? "CUDA" : "CPU";
    auto library = std::make_unique<Library>(Library::Kind::IMPL, "vnext_cuda", key, __FILE__, __LINE__);
    library->impl("rms_norm", TORCH_BOX(&rms_norm));
    library->impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
    library->impl("gate_and_mul", TORCH_BOX(&gate_and_mul));
    library->impl("rotary_kv_write", TORCH_BOX(&rotary_kv_write));
    library->impl("paged_attention", TORCH_BOX(&paged_attention));
    libraries[int(type)] = std::move(library);
}

void forget_operations(DeviceType type) { libraries[int(type)].reset(); }

}  // namespace vnext_cuda
