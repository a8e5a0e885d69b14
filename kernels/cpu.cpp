// Paged attention and append on a CPU. Compiled for one shape by cpu.py, which defines
//   ELEMENT    0: float32, 1: bfloat16, 2: float16
//   KEY_DIM, VALUE_DIM    numbers of one head's key and value
//   GROUP      query heads that share a KV head
// Scores, softmax and sums are float32 whatever the element is. The softmax is computed tile by tile with a running
// maximum (Milakov and Gimelshein 2018; Dao et al. 2022), and a long context is split over the cores, whose partial results
// are combined by their log-sum-exp (flash-decoding).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bfloat16 pairs are taken apart in little-endian order"
#endif

#if ELEMENT == 0
typedef float element;
#else
typedef uint16_t element;
#endif

namespace {

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

#if ELEMENT == 0
inline float widen(element x) { return x; }
#elif ELEMENT == 1
inline float widen(element x) { return float_of(static_cast<uint32_t>(x) << 16); }
#else
// By integers and one exact product, which vectorises everywhere: the product moves the exponent's bias.
inline float widen(element x) {
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fff) << 13, sign = static_cast<uint32_t>(x & 0x8000) << 16;
    const float moved = float_of(magnitude) * 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &moved, sizeof bits);
    return float_of(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bits));
}
#endif

// Rows of bfloat16 are widened two numbers at a time: first all even places, then all odd ones. Queries are laid out alike,
// and sums are put back at the end.
template <int DIM>
constexpr bool PAIRED = ELEMENT == 1 && DIM % 2 == 0;

template <int DIM>
constexpr int place(int d) { return !PAIRED<DIM> ? d : d % 2 ? DIM / 2 + d / 2 : d / 2; }

template <int DIM>
inline void widen_row(const element* row, float* wide) {
    if constexpr (PAIRED<DIM>) {
        #pragma omp simd
        for (int i = 0; i < DIM / 2; i++) {
            uint32_t pair;
            std::memcpy(&pair, row + 2 * i, sizeof pair);
            wide[i] = float_of(pair << 16);
            wide[DIM / 2 + i] = float_of(pair & 0xffff0000u);
        }
    } else {
        #pragma omp simd
        for (int d = 0; d < DIM; d++) wide[d] = widen(row[d]);
    }
}

constexpr int TILE = 64;              // tokens whose scores are held at once
constexpr int PARTIAL = VALUE_DIM + 2;  // a partial result: weighted sum of values, maximum, sum of weights
constexpr float MINUS_INFINITY = -INFINITY;

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float)), may_alias));

// The sum of each of sixteen vectors, by folding two into one: 45 operations instead of sixteen times eight.
inline Lanes sums_of(const Lanes* v) {
    Lanes half[8], quarter[4], eighth[2];
    for (int i = 0; i < 8; i++)
        half[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                  + __builtin_shufflevector(v[2 * i], v[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        quarter[i] = __builtin_shufflevector(half[2 * i], half[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
                     + __builtin_shufflevector(half[2 * i], half[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        eighth[i] = __builtin_shufflevector(quarter[2 * i], quarter[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
                    + __builtin_shufflevector(quarter[2 * i], quarter[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return __builtin_shufflevector(eighth[0], eighth[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
           + __builtin_shufflevector(eighth[0], eighth[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// One line of Runs.table.
struct Run {
    int64_t keys, values, key_layer, value_layer, key_head, value_head, tokens, position;
};

struct Call {
    const element* query;
    int64_t query_row, query_head, query_token;  // strides
    const Run* runs;
    const int64_t* row_starts;
    int64_t rows, kv_heads, queries, member, start, window;
    float scale, softcap;
    int64_t splits;
};

// exp(x) for x <= 0 to about one unit in the last place; 0 below the smallest normal number.
inline float exp_nonpositive(float x) {
    const float clamped = std::max(x, -87.0f);
    const float n = std::nearbyint(clamped * 1.44269504088896341f);
    // ln 2 in two parts, so that r stays exact for large n (Cody and Waite).
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &exponent, sizeof power);
    return x < -87.0f ? 0.0f : p * power;
}

// Attention of QUERIES queries of one KV head's group over tokens begin..end of a row, in the order of its runs.
template <int QUERIES>
struct Block {
    static constexpr int ROWS = QUERIES * GROUP;
    alignas(64) float query[ROWS][KEY_DIM];
    alignas(64) float sum[ROWS][VALUE_DIM];
    alignas(64) float score[ROWS][TILE];
    alignas(64) float wide[TILE * (KEY_DIM > VALUE_DIM ? KEY_DIM : VALUE_DIM)];
    float top[ROWS], weight[ROWS];

    void attend(const Call& call, int64_t row, int64_t head, int64_t first_query, int64_t count, int64_t begin, int64_t end) {
        load_queries(call, row, head, first_query, count);
        const int64_t last_position = call.start + first_query + count - 1;
        const int64_t first_position = call.window ? call.start + first_query - call.window + 1 : 0;
        int64_t at = 0;
        for (int64_t index = call.row_starts[row]; index < call.row_starts[row + 1] && at < end; at += call.runs[index++].tokens) {
            const Run& run = call.runs[index];
            // Only tokens that some query of the block sees: others may never have been written.
            const int64_t from = std::max({int64_t{0}, begin - at, first_position - run.position});
            const int64_t to = std::min({run.tokens, end - at, last_position + 1 - run.position});
            const element* keys = reinterpret_cast<const element*>(run.keys) + call.member * run.key_layer + head * run.key_head;
            const element* values = reinterpret_cast<const element*>(run.values) + call.member * run.value_layer + head * run.value_head;
            for (int64_t token = from; token < to; token += TILE) {
                const int tokens = static_cast<int>(std::min<int64_t>(TILE, to - token));
                if constexpr (ROWS < 8) score_by_dots(keys + token * KEY_DIM, tokens);
                else score_by_columns(keys + token * KEY_DIM, tokens);
                if (call.softcap > 0) cap(call.softcap, tokens);
                mask(call, first_query, run.position + token, tokens);
                rescale(tokens);
                add_values(values + token * VALUE_DIM, tokens);
            }
        }
    }

    void load_queries(const Call& call, int64_t row, int64_t head, int64_t first_query, int64_t count) {
        for (int r = 0; r < ROWS; r++) {
            const int64_t index = std::min<int64_t>(r / GROUP, count - 1);  // a block that is not full repeats its last query
            const element* source = call.query + row * call.query_row + (head * GROUP + r % GROUP) * call.query_head
                                    + (first_query + index) * call.query_token;
            for (int d = 0; d < KEY_DIM; d++) query[r][place<KEY_DIM>(d)] = widen(source[d]) * call.scale;
            for (int d = 0; d < VALUE_DIM; d++) sum[r][d] = 0;
            top[r] = MINUS_INFINITY;
            weight[r] = 0;
        }
    }

    // For few rows: sixteen tokens at a time, each key widened once, whose sums are then folded together.
    void score_by_dots(const element* keys, int tokens) {
        int t = 0;
        if constexpr (KEY_DIM % LANES == 0)
            for (; t + LANES <= tokens; t += LANES) {
                Lanes part[ROWS][LANES];
                for (int i = 0; i < LANES; i++) {
                    alignas(64) float wide[KEY_DIM];
                    widen_row<KEY_DIM>(keys + (t + i) * KEY_DIM, wide);
                    for (int r = 0; r < ROWS; r++) {
                        Lanes dot = {};
                        for (int d = 0; d < KEY_DIM; d += LANES)
                            dot += *reinterpret_cast<const Lanes*>(wide + d) * *reinterpret_cast<const Lanes*>(query[r] + d);
                        part[r][i] = dot;
                    }
                }
                for (int r = 0; r < ROWS; r++) *reinterpret_cast<Lanes*>(score[r] + t) = sums_of(part[r]);
            }
        score_one_by_one(keys, t, tokens);
    }

    void score_one_by_one(const element* keys, int first, int tokens) {
        for (int t = first; t < tokens; t++) {
            alignas(64) float wide[KEY_DIM];
            widen_row<KEY_DIM>(keys + t * KEY_DIM, wide);
            for (int r = 0; r < ROWS; r++) {
                float dot = 0;
                #pragma omp simd reduction(+ : dot)
                for (int d = 0; d < KEY_DIM; d++) dot += wide[d] * query[r][d];
                score[r][t] = dot;
            }
        }
    }

    // For many rows: the tile is turned over once, and no sum runs across a vector.
    void score_by_columns(const element* keys, int tokens) {
        for (int t = 0; t < TILE; t++)
            for (int d = 0; d < KEY_DIM; d++) wide[place<KEY_DIM>(d) * TILE + t] = t < tokens ? widen(keys[t * KEY_DIM + d]) : 0;
        for (int r = 0; r < ROWS; r += 4) {
            alignas(64) float dots[4][TILE] = {};
            const int last = ROWS - 1;
            const float *a = query[r], *b = query[std::min(r + 1, last)], *c = query[std::min(r + 2, last)], *e = query[std::min(r + 3, last)];
            for (int d = 0; d < KEY_DIM; d++) {
                const float* column = wide + d * TILE;
                #pragma omp simd
                for (int t = 0; t < TILE; t++) {
                    dots[0][t] += a[d] * column[t];
                    dots[1][t] += b[d] * column[t];
                    dots[2][t] += c[d] * column[t];
                    dots[3][t] += e[d] * column[t];
                }
            }
            for (int i = 0; i < 4 && r + i < ROWS; i++) std::memcpy(score[r + i], dots[i], sizeof dots[i]);
        }
    }

    void cap(float softcap, int tokens) {
        for (int r = 0; r < ROWS; r++)
            for (int t = 0; t < tokens; t++) score[r][t] = softcap * std::tanh(score[r][t] / softcap);
    }

    // Positions of the tile are position .. position + tokens; a query sees its own and those before, within the window.
    void mask(const Call& call, int64_t first_query, int64_t position, int tokens) {
        if (QUERIES == 1) return;  // attend() has left out what a single query does not see
        const int64_t first_own = call.start + first_query;
        const bool all_see_last = position + tokens - 1 <= first_own;
        const bool all_see_first = !call.window || position > first_own + QUERIES - 1 - call.window;
        if (all_see_last && all_see_first) return;
        for (int r = 0; r < ROWS; r++) {
            const int64_t own = first_own + r / GROUP;
            for (int t = 0; t < tokens; t++)
                if (position + t > own || (call.window && position + t <= own - call.window)) score[r][t] = MINUS_INFINITY;
        }
    }

    void rescale(int tokens) {
        for (int r = 0; r < ROWS; r++) {
            float highest = top[r];
            #pragma omp simd reduction(max : highest)
            for (int t = 0; t < tokens; t++) highest = std::max(highest, score[r][t]);
            if (highest == MINUS_INFINITY) {
                // Nothing is seen here, or all of it is NaN, which must not vanish.
                for (int t = 0; t < tokens; t++) {
                    if (std::isnan(score[r][t])) weight[r] = top[r] = NAN;
                    score[r][t] = 0;
                }
                continue;
            }
            const float shrink = top[r] == MINUS_INFINITY ? 0.0f : exp_nonpositive(top[r] - highest);
            float total = 0;
            #pragma omp simd reduction(+ : total)
            for (int t = 0; t < tokens; t++) {
                const float w = exp_nonpositive(score[r][t] - highest);
                score[r][t] = w;
                total += w;
            }
            top[r] = highest;
            weight[r] = weight[r] * shrink + total;
            if (shrink != 1.0f) {
                #pragma omp simd
                for (int d = 0; d < VALUE_DIM; d++) sum[r][d] *= shrink;
            }
        }
    }

    void add_values(const element* values, int tokens) {
        if constexpr (ROWS < 8) {
            for (int t = 0; t < tokens; t++) {
                alignas(64) float wide[VALUE_DIM];
                widen_row<VALUE_DIM>(values + t * VALUE_DIM, wide);
                for (int r = 0; r < ROWS; r++) {
                    const float w = score[r][t];
                    #pragma omp simd
                    for (int d = 0; d < VALUE_DIM; d++) sum[r][d] += w * wide[d];
                }
            }
        } else {
            for (int t = 0; t < tokens; t++) widen_row<VALUE_DIM>(values + t * VALUE_DIM, wide + t * VALUE_DIM);
            for (int r = 0; r < ROWS; r++)
                for (int t = 0; t < tokens; t++) {
                    const float w = score[r][t];
                    if (w == 0) continue;
                    #pragma omp simd
                    for (int d = 0; d < VALUE_DIM; d++) sum[r][d] += w * wide[t * VALUE_DIM + d];
                }
        }
    }
};

int64_t tokens_of(const Call& call, int64_t row) {
    int64_t total = 0;
    for (int64_t run = call.row_starts[row]; run < call.row_starts[row + 1]; run++) total += call.runs[run].tokens;
    return total;
}

// partial: [rows, kv_heads, query blocks, splits, QUERIES * GROUP, PARTIAL]
template <int QUERIES>
void attend_blocks(const Call& call, float* partial) {
    const int64_t blocks = (call.queries + QUERIES - 1) / QUERIES;
    const int64_t tasks = call.rows * call.kv_heads * blocks * call.splits;
    #pragma omp parallel
    {
        Block<QUERIES> block;
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t split = task % call.splits, query_block = task / call.splits % blocks;
            const int64_t head = task / (call.splits * blocks) % call.kv_heads, row = task / (call.splits * blocks * call.kv_heads);
            const int64_t total = tokens_of(call, row);
            const int64_t share = ((total + call.splits - 1) / call.splits + TILE - 1) / TILE * TILE;
            const int64_t first_query = query_block * QUERIES;
            block.attend(call, row, head, first_query, std::min<int64_t>(QUERIES, call.queries - first_query),
                         std::min(total, split * share), std::min(total, (split + 1) * share));
            float* mine = partial + task * block.ROWS * PARTIAL;
            for (int r = 0; r < block.ROWS; r++, mine += PARTIAL) {
                for (int d = 0; d < VALUE_DIM; d++) mine[d] = block.sum[r][place<VALUE_DIM>(d)];
                mine[VALUE_DIM] = block.top[r];
                mine[VALUE_DIM + 1] = block.weight[r];
            }
        }
    }
}

// out: [rows, queries, query_heads, VALUE_DIM]; lse: [rows, queries, query_heads]
template <int QUERIES>
void combine(const Call& call, const float* partial, float* out, float* lse) {
    constexpr int ROWS = QUERIES * GROUP;
    const int64_t blocks = (call.queries + QUERIES - 1) / QUERIES, results = call.rows * call.queries * call.kv_heads * GROUP;
    #pragma omp parallel for if (results * call.splits > 4096)
    for (int64_t result = 0; result < results; result++) {
        const int64_t group = result % GROUP, head = result / GROUP % call.kv_heads;
        const int64_t q = result / (GROUP * call.kv_heads) % call.queries, row = result / (GROUP * call.kv_heads * call.queries);
        const float* first = partial + ((row * call.kv_heads + head) * blocks + q / QUERIES) * call.splits * ROWS * PARTIAL
                             + (q % QUERIES * GROUP + group) * PARTIAL;
        float highest = MINUS_INFINITY, total = 0;
        for (int64_t split = 0; split < call.splits; split++) {
            const float top = first[split * ROWS * PARTIAL + VALUE_DIM];
            highest = std::isnan(top) ? top : std::max(highest, top);
        }
        float* into = out + result * VALUE_DIM;
        for (int d = 0; d < VALUE_DIM; d++) into[d] = 0;
        for (int64_t split = 0; split < call.splits; split++) {
            const float* part = first + split * ROWS * PARTIAL;
            if (part[VALUE_DIM] == MINUS_INFINITY) continue;
            const float factor = std::exp(part[VALUE_DIM] - highest);
            total += factor * part[VALUE_DIM + 1];
            for (int d = 0; d < VALUE_DIM; d++) into[d] += factor * part[d];
        }
        for (int d = 0; d < VALUE_DIM && total != 0; d++) into[d] /= total;
        lse[result] = total != 0 ? highest + std::log(total) : MINUS_INFINITY;
    }
}

}  // namespace

extern "C" {

// Queries that one block takes together when there are several.
int64_t tierkv_block_queries() { return std::max(1, 16 / GROUP); }

int64_t tierkv_partial_floats() { return PARTIAL; }

void tierkv_attention(const void* query, int64_t query_row, int64_t query_head, int64_t query_token, const int64_t* runs,
                      const int64_t* row_starts, int64_t rows, int64_t kv_heads, int64_t queries, int64_t member, int64_t start,
                      int64_t window, float scale, float softcap, int64_t splits, float* partial, float* out, float* lse) {
    const Call call{static_cast<const element*>(query), query_row, query_head, query_token, reinterpret_cast<const Run*>(runs),
                    row_starts, rows, kv_heads, queries, member, start, window, scale, softcap, splits};
    constexpr int SEVERAL = GROUP < 16 ? 16 / GROUP : 1;
    if (queries == 1) {
        attend_blocks<1>(call, partial);
        combine<1>(call, partial, out, lse);
    } else {
        attend_blocks<SEVERAL>(call, partial);
        combine<SEVERAL>(call, partial, out, lse);
    }
}

// Copies the dense tokens of keys [rows, kv_heads, tokens, KEY_DIM] and values into the tokens that the runs name.
void tierkv_append(const void* keys, int64_t key_row, int64_t key_head, int64_t key_token, const void* values, int64_t value_row,
                   int64_t value_head, int64_t value_token, const int64_t* table, const int64_t* row_starts, int64_t rows,
                   int64_t kv_heads, int64_t tokens, int64_t member) {
    const Run* runs = reinterpret_cast<const Run*>(table);
    #pragma omp parallel for if (rows * kv_heads * tokens > 1024)
    for (int64_t task = 0; task < rows * kv_heads; task++) {
        const int64_t head = task % kv_heads, row = task / kv_heads;
        const element* key = static_cast<const element*>(keys) + row * key_row + head * key_head;
        const element* value = static_cast<const element*>(values) + row * value_row + head * value_head;
        for (int64_t index = row_starts[row]; index < row_starts[row + 1]; index++) {
            const Run& run = runs[index];
            element* own_key = reinterpret_cast<element*>(run.keys) + member * run.key_layer + head * run.key_head;
            element* own_value = reinterpret_cast<element*>(run.values) + member * run.value_layer + head * run.value_head;
            for (int64_t t = 0; t < run.tokens; t++, key += key_token, value += value_token) {
                std::memcpy(own_key + t * KEY_DIM, key, KEY_DIM * sizeof(element));
                std::memcpy(own_value + t * VALUE_DIM, value, VALUE_DIM * sizeof(element));
            }
        }
    }
}

}  // extern "C"
