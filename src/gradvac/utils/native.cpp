// What a step computes of many small tensors on a CPU, without Python in between; see native.py.
//
// Public interfaces of ATen and pybind11 alone. A function that is given what it does not know
// (another device, dtype or layout) returns None, and Python's own way is taken, which is the
// reference.
//
// K components, T tasks, B rows, N entries, n alike, O outputs, I inputs, D width, P entries of a
// parameter

#include "native.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define BY_PROCESSOR
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

namespace gradvac {

using Pair = std::pair<Tensor, std::optional<Tensor>>;

// Divides 0..size into a part for each of torch's threads, unless there are too few numbers for
// that. Parts do not depend on who runs them: another OpenMP than torch's may have other numbers of
// threads.
template <class Do>
static void by_thread(int64_t size, int64_t numel, const Do& act) {
  auto num = numel > (1 << 18) ? std::min<int64_t>(size, at::get_num_threads()) : 1;
  at::parallel_for(0, num, 1, [&](int64_t begin, int64_t end) {
    for (auto part = begin; part < end; part++)
      act(part, part * size / num, (part + 1) * size / num);
  });
}

static bool are_indices(const Tensor& t) {
  return is_plain(t, at::kLong) && t.dim() == 1 && t.is_contiguous();
}

// -- entries by task ------------------------------------------------------------

bool fits(const Tensor& index, int64_t num_tasks) {
  if (!are_indices(index) || !index.numel() || num_tasks < 1) return false;
  auto* tasks = index.const_data_ptr<int64_t>();
  return std::all_of(tasks, tasks + index.numel(),
                     [&](int64_t t) { return t >= 0 && t < num_tasks; });
}

Rows::Rows(const Tensor& given, int64_t num_tasks)
    : index(given),
      tasks(given.const_data_ptr<int64_t>()),
      counts(num_tasks),
      starts(num_tasks),
      num(given.numel()) {
  for (int64_t r = 0; r < num; r++) counts[tasks[r]]++;
  for (int64_t t = 1; t < num_tasks; t++) starts[t] = starts[t - 1] + counts[t - 1];
  for (auto count : counts) most = std::max(most, count);
  order.resize(num);
  auto next = starts;
  for (int64_t r = 0; r < num; r++) order[next[tasks[r]]++] = r;
}

// The entries [B * s, W] of some tasks, each padded with zeros to `most` rows, if it has fewer:
// [tasks, most * s, W].
static void gather(const Tensor& from, const Rows& rows, int64_t first, int64_t last, int64_t most,
                   const Tensor& to) {
  auto bytes = from.nbytes() / rows.num;
  auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* start = static_cast<char*>(to.mutable_data_ptr());
  by_thread(last - first, from.numel(), [&](int64_t, int64_t own_first, int64_t own_last) {
    for (auto t = first + own_first; t < first + own_last; t++) {
      auto* target = start + (t - first) * most * bytes;
      for (int64_t r = 0; r < rows.counts[t]; r++, target += bytes)
        std::memcpy(target, source + rows.order[rows.starts[t] + r] * bytes, bytes);
      std::memset(target, 0, std::max<int64_t>(0, most - rows.counts[t]) * bytes);
    }
  });
}

void add_products(const Rows& rows, const Tensor& given_x, const Tensor& given_g,
                  bool is_transposed, const Tensor& out, bool is_first) {
  int64_t T = rows.counts.size(), N = given_x.size(0), I = given_x.size(1), per_row = N / rows.num,
          O = given_g.numel() / N;
  auto x = given_x.contiguous(), g = given_g.contiguous();
  // [.., entries, width] each
  auto add = [&](const Tensor& to, const Tensor& by_x, const Tensor& by_g) {
    auto left = (is_transposed ? by_g : by_x).transpose(-2, -1);
    auto& right = is_transposed ? by_x : by_g;
    if (to.dim() == 3)
      is_first ? at::bmm_out(const_cast<Tensor&>(to), left, right) : to.baddbmm_(left, right);
    else
      is_first ? at::mm_out(const_cast<Tensor&>(to), left, right) : to.addmm_(left, right);
  };
  auto most = rows.most * per_row;
  if (most * T * 4 <= N * 5) {  // few zeros in between
    auto options = x.options();
    auto by_x = at::empty({T, most, I}, options), by_g = at::empty({T, most, O}, options);
    gather(x, rows, 0, T, rows.most, by_x);
    gather(g, rows, 0, T, rows.most, by_g);
    add(out, by_x, by_g);
    return;
  }
  for (int64_t t = 0; t < T; t++) {  // every task by itself
    auto count = rows.counts[t] * per_row;
    auto part = out.select(0, t);
    if (!count) {
      if (is_first) part.zero_();
      continue;
    }
    auto by_x = at::empty({count, I}, x.options()), by_g = at::empty({count, O}, x.options());
    gather(x, rows, t, t + 1, 0, by_x);
    gather(g, rows, t, t + 1, 0, by_g);
    add(part, by_x, by_g);
  }
}

// Columns first..last of them.
template <class Number, class Value>
INLINE void sum_by_task(const Rows& rows, int64_t per_row, int64_t width, int64_t first,
                        int64_t last, double* sums, Number* out, Value value) {
  for (int64_t r = 0, n = 0; r < rows.num; r++) {
    auto* to = sums + rows.tasks[r] * width;
    for (int64_t s = 0; s < per_row; s++, n++)
      for (auto d = first; d < last; d++) to[d] += value(n, d);
  }
  for (size_t t = 0; t < rows.counts.size(); t++)
    for (auto d = first; d < last; d++)
      out[t * width + d] += static_cast<Number>(sums[t * width + d]);
}

template <class Number>
INLINE void sums_of_any(const Rows& rows, int64_t per_row, int64_t width, int64_t first,
                        int64_t last, double* sums, Number* out, const Number* g, const Number* x,
                        const Number* mean, const Number* scale) {
  auto sum = [&](auto value) __attribute__((always_inline)) {
    sum_by_task(rows, per_row, width, first, last, sums, out, value);
  };
  if (!x)
    sum([=](int64_t n, int64_t d) { return static_cast<double>(g[n * width + d]); });
  else if (!scale)
    sum([=](int64_t n, int64_t d) {
      return static_cast<double>(g[n * width + d] * x[n * width + d]);
    });
  else if (!mean)
    sum([=](int64_t n, int64_t d) {
      return static_cast<double>(g[n * width + d] * (x[n * width + d] * scale[n]));
    });
  else
    sum([=](int64_t n, int64_t d) {
      return static_cast<double>(g[n * width + d] * ((x[n * width + d] - mean[n]) * scale[n]));
    });
}
#define SUMS(Number)                                                                               \
  FOR_EACH_PROCESSOR static void sums_of(                                                          \
      const Rows& rows, int64_t per_row, int64_t width, int64_t first, int64_t last, double* sums, \
      Number* out, const Number* g, const Number* x, const Number* mean, const Number* scale) {    \
    sums_of_any(rows, per_row, width, first, last, sums, out, g, x, mean, scale);                  \
  }
SUMS(float)
SUMS(double)

void add_sums(const Rows& rows, const Tensor& out, const Tensor& given,
              const std::optional<Tensor>& x, const std::optional<Tensor>& mean,
              const std::optional<Tensor>& scale) {
  int64_t T = rows.counts.size(), width = out.numel() / T,
          per_row = given.numel() / (rows.num * width);
  thread_local std::vector<double> sums;
  sums.assign(T * width, 0.);
  auto g = given.contiguous();
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "add_sums", [&] {
    Tensor kept[3];
    const scalar_t* data[3] = {};
    const std::optional<Tensor>* factors[] = {&x, &mean, &scale};
    for (int i = 0; i < 3; i++)
      if (*factors[i]) data[i] = (kept[i] = (*factors[i])->contiguous()).const_data_ptr<scalar_t>();
    auto* to = sums.data();
    by_thread(width, g.numel(), [&](int64_t, int64_t first, int64_t last) {
      sums_of(rows, per_row, width, first, last, to, out.mutable_data_ptr<scalar_t>(),
              g.const_data_ptr<scalar_t>(), data[0], data[1], data[2]);
    });
  });
}

void add_lookups(const Rows& rows, const Tensor& out, const Tensor& given, const int64_t* tokens) {
  auto values = given.contiguous();
  int64_t V = out.size(1), D = out.size(2), N = values.numel() / D, per_row = N / rows.num;
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "add_lookups", [&] {
    auto* from = values.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    for (int64_t n = 0; n < N; n++) {
      if (tokens[n] < 0) continue;
      auto* row = to + (rows.tasks[n / per_row] * V + tokens[n]) * D;
      for (int64_t d = 0; d < D; d++) row[d] += from[n * D + d];
    }
  });
}

void number_tokens(std::vector<int64_t>& tokens, int64_t num_rows, std::vector<int64_t>& found) {
  thread_local std::vector<int32_t> slots;  // -1 but in here
  if (static_cast<int64_t>(slots.size()) < num_rows) slots.resize(num_rows, -1);
  found.clear();
  found.reserve(tokens.size());  // nothing may fail while slots are taken
  for (auto& token : tokens) {
    if (token < 0) continue;
    auto& slot = slots[token];
    if (slot < 0) {
      slot = found.size();
      found.push_back(token);
    }
    token = slot;
  }
  for (auto one : found) slots[one] = -1;
}

// -- junctions ------------------------------------------------------------

// Task gradients of weights [n, T, O * I] and shifts [n, T, O] of linear layers that are alike;
// added up if they are one layer.
static std::optional<Pair> products(const Tensors& inputs, const Tensors& gradients,
                                    const Tensor& index, int64_t num_tasks, bool is_transposed,
                                    bool has_shift, bool is_one) {
  if (inputs.empty() || inputs.size() != gradients.size() || !fits(index, num_tasks)) return {};
  auto dtype = inputs[0].scalar_type();
  if (!is_real(dtype) || inputs[0].dim() != 2 || gradients[0].dim() < 2) return {};
  auto B = index.numel(), N = inputs[0].size(0), I = inputs[0].size(1), O = gradients[0].size(-1);
  if (!N || !I || !O || N % B) return {};
  for (size_t i = 0; i < inputs.size(); i++)
    if (!is_plain(inputs[i], dtype) || !is_plain(gradients[i], dtype) || inputs[i].dim() != 2 ||
        inputs[i].size(0) != N || inputs[i].size(1) != I || gradients[i].dim() < 2 ||
        gradients[i].size(-1) != O || gradients[i].numel() != N * O)
      return {};
  at::AutoDispatchBelowADInplaceOrView plain;  // nothing here is differentiated
  Rows rows(index, num_tasks);
  int64_t n = is_one ? 1 : inputs.size();
  auto out =
      at::empty({n, num_tasks, is_transposed ? O : I, is_transposed ? I : O}, inputs[0].options());
  auto shifts = has_shift ? at::zeros({n, num_tasks, O}, inputs[0].options()) : Tensor();
  for (size_t i = 0; i < inputs.size(); i++) {
    auto number = is_one ? 0 : i;
    add_products(rows, inputs[i], gradients[i], is_transposed, out.select(0, number),
                 !is_one || i == 0);
    if (has_shift) add_sums(rows, shifts.select(0, number), gradients[i]);
  }
  return Pair(out.view({n, num_tasks, -1}),
              has_shift ? std::optional<Tensor>(shifts) : std::nullopt);
}

// Those of scales [n, T, D], and of shifts, of normalisations (with `scale`, perhaps `mean`) or of
// factors that are alike.
static std::optional<Pair> scales(const Tensors& inputs, const Tensors& means,
                                  const Tensors& deviations, const Tensors& gradients,
                                  const Tensor& index, int64_t num_tasks, bool has_shift,
                                  bool is_one) {
  if (inputs.empty() || inputs.size() != gradients.size() || !fits(index, num_tasks)) return {};
  auto dtype = inputs[0].scalar_type();
  if (!is_real(dtype) || gradients[0].dim() < 2) return {};
  auto D = gradients[0].size(-1), B = index.numel(), entries = gradients[0].numel();
  if (!entries || (entries / D) % B) return {};
  for (auto* every : {&means, &deviations})
    if (!every->empty() && every->size() != inputs.size()) return {};
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!is_plain(inputs[i], dtype) || !is_plain(gradients[i], dtype) ||
        inputs[i].sizes() != gradients[0].sizes() || gradients[i].sizes() != gradients[0].sizes())
      return {};
    for (auto* every : {&means, &deviations})
      if (!every->empty() && (!is_plain((*every)[i], dtype) || (*every)[i].numel() * D != entries))
        return {};
  }
  at::AutoDispatchBelowADInplaceOrView plain;  // nothing here is differentiated
  Rows rows(index, num_tasks);
  int64_t n = is_one ? 1 : inputs.size();
  auto out = at::zeros({n, num_tasks, D}, inputs[0].options());
  auto shifts = has_shift ? at::zeros_like(out) : Tensor();
  for (size_t i = 0; i < inputs.size(); i++) {
    auto at_i = [&](const Tensors& every) {
      return every.empty() ? std::nullopt : std::optional<Tensor>(every[i]);
    };
    auto number = is_one ? 0 : i;
    add_sums(rows, out.select(0, number), gradients[i], inputs[i], at_i(means), at_i(deviations));
    if (has_shift) add_sums(rows, shifts.select(0, number), gradients[i]);
  }
  return Pair(out, has_shift ? std::optional<Tensor>(shifts) : std::nullopt);
}

// The tokens of a batch, and task gradients of their rows alone, [T, number of tokens, D].
static std::optional<std::pair<Tensor, Tensor>> lookup(const Tensor& values, const Tensor& tokens,
                                                       const Tensor& index, int64_t num_tasks,
                                                       int64_t num_rows) {
  auto dtype = values.scalar_type();
  if (!is_real(dtype) || !is_plain(values, dtype) || values.dim() != 2 || !are_indices(tokens) ||
      !fits(index, num_tasks))
    return {};
  auto N = tokens.numel();
  if (values.size(0) != N || !N || N % index.numel() || num_rows > MOST_ROWS) return {};
  auto* token = tokens.const_data_ptr<int64_t>();
  if (!std::all_of(token, token + N, [&](int64_t t) { return t >= 0 && t < num_rows; })) return {};
  std::vector<int64_t> found, numbers(token, token + N);
  number_tokens(numbers, num_rows, found);
  auto out =
      at::zeros({num_tasks, static_cast<int64_t>(found.size()), values.size(1)}, values.options());
  add_lookups(Rows(index, num_tasks), out, values, numbers.data());
  return std::pair(at::tensor(found, tokens.options()), out);
}

// -- Gram matrices and combinations ------------------------------------------------------------

constexpr int64_t CHUNK = 256;  // columns that are multiplied while they are in the cache

// The inner products of rows i.. with rows j.. of some columns, in several sums that depend on
// nothing.
template <int ROWS>
INLINE void multiply(const double* a, const double* b, int64_t size, double* to) {
  double sums[ROWS][4] = {};
  for (int64_t c = 0; c < size; c += 4)
    for (int r = 0; r < ROWS; r++)
      for (int l = 0; l < 4; l++) sums[r][l] += a[c + l] * b[r * CHUNK + c + l];
  for (int r = 0; r < ROWS; r++) to[r] += (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

#ifdef BY_PROCESSOR
// The same of two rows with four, with what those processors have for it: WIDTH numbers at once.
#define FUSED(name, processor, Numbers, WIDTH, load, multiply_add, sum_of)               \
  __attribute__((target(processor))) static void name(                                   \
      const double* a, const double* b, int64_t size, double* first, double* second) {   \
    Numbers s[8] = {};                                                                   \
    for (int64_t c = 0; c < size; c += WIDTH) {                                          \
      auto x = load(a + c), y = load(a + CHUNK + c);                                     \
      _Pragma("GCC unroll 4") for (int r = 0; r < 4; r++) {                              \
        auto z = load(b + r * CHUNK + c);                                                \
        s[r] = multiply_add(x, z, s[r]);                                                 \
        s[4 + r] = multiply_add(y, z, s[4 + r]);                                         \
      }                                                                                  \
    }                                                                                    \
    for (int r = 0; r < 4; r++) first[r] += sum_of(s[r]), second[r] += sum_of(s[4 + r]); \
  }
__attribute__((target("avx2,fma"))) static inline double sum_of_four(__m256d v) {
  auto half = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(half, _mm_unpackhi_pd(half, half)));
}
FUSED(multiply_by_fours, "avx2,fma", __m256d, 4, _mm256_loadu_pd, _mm256_fmadd_pd, sum_of_four)
FUSED(multiply_by_eights, "avx512f", __m512d, 8, _mm512_loadu_pd, _mm512_fmadd_pd,
      _mm512_reduce_add_pd)
static const auto multiply_fused = __builtin_cpu_supports("avx512f") ? multiply_by_eights
                                   : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                       ? multiply_by_fours
                                       : nullptr;
#endif

// As double, T rounded up to whole fours and columns to whole eights.
template <class Number>
INLINE void widen(const Number* block, int64_t T, int64_t P, int64_t start, int64_t size,
                  int64_t whole, double* to) {
  for (int64_t t = 0; t < T; t++, to += CHUNK) {
    auto* from = block + t * P + start;
    for (int64_t c = 0; c < size; c++) to[c] = from[c];
    for (int64_t c = size; c < whole; c++) to[c] = 0.;
  }
}

// Of columns first..last.
template <class Number>
INLINE void gram_of_any(const Number* block, int64_t T, int64_t P, int64_t first, int64_t last,
                        double* scratch, double* sums) {
  auto rows = (T + 3) / 4 * 4;  // those beyond T are zeros
  for (auto start = first; start < last; start += CHUNK) {
    auto size = std::min(CHUNK, last - start), whole = (size + 7) / 8 * 8;
    widen(block, T, P, start, size, whole, scratch);
    for (int64_t i = 0; i < T; i += 2)
      for (auto j = i / 4 * 4; j < rows; j += 4) {
        auto *a = scratch + i * CHUNK, *b = scratch + j * CHUNK;
        auto *upper = sums + i * rows + j, *lower = upper + rows;
#ifdef BY_PROCESSOR
        if (multiply_fused) {
          multiply_fused(a, b, whole, upper, lower);
          continue;
        }
#endif
        multiply<4>(a, b, whole, upper);
        multiply<4>(a + CHUNK, b, whole, lower);
      }
  }
}

template <class Number>
INLINE void weighted_sum(const Number* block, const double* weights, int64_t T, int64_t P,
                         int64_t first, int64_t last, Number* out, bool is_added) {
  for (auto start = first; start < last; start += CHUNK) {
    auto size = std::min(CHUNK, last - start);
    auto* to = out + start;
    if (!is_added) std::fill(to, to + size, Number(0));
    for (int64_t t = 0; t < T; t++) {
      auto weight = static_cast<Number>(weights[t]);
      auto* from = block + t * P + start;
      for (int64_t c = 0; c < size; c++) to[c] += weight * from[c];
    }
  }
}
#define OF_BLOCKS(Number)                                                                          \
  FOR_EACH_PROCESSOR static void gram_of(const Number* block, int64_t T, int64_t P, int64_t first, \
                                         int64_t last, double* scratch, double* sums) {            \
    gram_of_any(block, T, P, first, last, scratch, sums);                                          \
  }                                                                                                \
  FOR_EACH_PROCESSOR static void combination_of(const Number* block, const double* weights,        \
                                                int64_t T, int64_t P, int64_t first, int64_t last, \
                                                Number* out, bool is_added) {                      \
    weighted_sum(block, weights, T, P, first, last, out, is_added);                                \
  }
OF_BLOCKS(float)
OF_BLOCKS(double)

void add_gram(const Tensor& block, double* out) {
  int64_t T = block.size(0), P = block.size(1), rows = (T + 3) / 4 * 4;
  // Sums are added in the order of parts, not as threads end: the same bits each time.
  std::vector<std::vector<double>> by_part(at::get_num_threads());
  by_thread(P, block.numel(), [&](int64_t part, int64_t first, int64_t last) {
    thread_local std::vector<double> scratch;
    scratch.resize(rows * CHUNK);
    std::fill(scratch.begin() + T * CHUNK, scratch.end(), 0.);
    auto& sums = by_part[part];
    sums.assign(rows * rows, 0.);
    AT_DISPATCH_FLOATING_TYPES(block.scalar_type(), "add_gram", [&] {
      gram_of(block.const_data_ptr<scalar_t>(), T, P, first, last, scratch.data(), sums.data());
    });
  });
  for (auto& sums : by_part) {
    if (sums.empty()) continue;
    for (int64_t i = 0; i < T; i++)
      for (auto j = i; j < T; j++) out[i * T + j] += sums[i * rows + j];
  }
}

void mirror(double* gram, int64_t T) {
  for (int64_t i = 0; i < T; i++)
    for (int64_t j = 0; j < i; j++) gram[i * T + j] = gram[j * T + i];
}

void combine_to(const Tensor& block, const double* weights, const Tensor& out, bool is_added) {
  AT_DISPATCH_FLOATING_TYPES(block.scalar_type(), "combine_to", [&] {
    // Before there are threads: memory that is copied when written is asked for once.
    auto* from = block.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    by_thread(block.size(1), block.numel(), [&](int64_t, int64_t first, int64_t last) {
      combination_of(from, weights, block.size(0), block.size(1), first, last, to, is_added);
    });
  });
}

static bool are_blocks(const Tensors& blocks, const std::vector<int64_t>& components,
                       int64_t num_components) {
  if (blocks.empty()) return false;
  size_t number = 0;
  for (auto& block : blocks) {
    if (!is_real(block.scalar_type()) || !is_plain(block, block.scalar_type()) ||
        block.dim() != 3 || !block.is_contiguous() || block.size(1) != blocks[0].size(1) ||
        !block.size(1))
      return false;
    number += block.size(0);
  }
  return number == components.size() &&
         std::all_of(components.begin(), components.end(),
                     [&](int64_t k) { return k >= 0 && k < num_components; });
}

// [K, T, T] of task gradients [n, T, P] whose components are given, in float64.
static std::optional<Tensor> grams(const Tensors& blocks, const std::vector<int64_t>& components,
                                   int64_t num_components) {
  if (!are_blocks(blocks, components, num_components)) return {};
  auto T = blocks[0].size(1);
  auto out = at::zeros({num_components, T, T}, blocks[0].options().dtype(at::kDouble));
  auto* to = out.mutable_data_ptr<double>();
  size_t number = 0;
  for (auto& block : blocks)
    for (auto& one : block.unbind()) add_gram(one, to + components[number++] * T * T);
  for (int64_t k = 0; k < num_components; k++) mirror(to + k * T * T, T);
  return out;
}

// sum_t weights[k, t] g_t of every parameter, [P] each.
static std::optional<Tensors> combine(const Tensors& blocks, const std::vector<int64_t>& components,
                                      const Tensor& weights) {
  if (!is_plain(weights, weights.scalar_type()) || !is_real(weights.scalar_type()) ||
      weights.dim() != 2 || !are_blocks(blocks, components, weights.size(0)) ||
      weights.size(1) != blocks[0].size(1))
    return {};
  at::AutoDispatchBelowADInplaceOrView
      plain;  // parts of one result are no views, as optimizers of old take for granted
  auto own = weights.to(at::kDouble).contiguous();
  Tensors updates;
  updates.reserve(components.size());
  for (auto& block : blocks) {
    auto n = block.size(0), P = block.size(2);
    auto update = at::empty({n, P}, block.options());
    for (int64_t i = 0; i < n; i++) {
      updates.push_back(at::as_strided(update, {P}, {1}, i * P));
      combine_to(block.select(0, i),
                 own.const_data_ptr<double>() + components[updates.size() - 1] * weights.size(1),
                 updates.back(), false);
    }
  }
  return updates;
}

// Adds updates to `.grad` of leaves without hooks; those that do not fit, or are to be added on a
// GPU, which adds many at once, are left, and their places returned.
static std::vector<int64_t> accumulate(const Tensors& leaves, const Tensors& updates) {
  std::vector<int64_t> left;
  at::AutoDispatchBelowADInplaceOrView plain;
  for (size_t i = 0; i < leaves.size(); i++) {
    auto &leaf = leaves[i], &update = updates.at(i);
    if (!is_ordinary(leaf, update.scalar_type()) || !is_ordinary(update, update.scalar_type()) ||
        !(leaf.is_cpu() || leaf.is_cuda()) || leaf.device() != update.device() ||
        !leaf.is_contiguous() || !update.is_contiguous() || leaf.numel() != update.numel() ||
        !leaf.is_leaf() || !leaf.requires_grad() || !has_own_dtype(leaf)) {
      left.push_back(i);
      continue;
    }
    auto own = at::as_strided(update, leaf.sizes(), leaf.strides(), update.storage_offset());
    auto& grad = leaf.mutable_grad();
    if (!grad.defined())
      grad = own;
    else if (is_plain(grad, own.scalar_type()) && !grad.requires_grad() &&
             grad.sizes() == own.sizes()) {
      grad.add_(own);
      grad.unsafeGetTensorImpl()->bump_version();
    } else
      left.push_back(i);
  }
  return left;
}

// -- rules ------------------------------------------------------------

struct Sweep {
  int64_t T;
  double cancelled, limit;
  std::vector<double> products = std::vector<double>(T);

  // That of pairwise.py, row by row: the same operations in the same order, to the last bit. `seen`
  // is NaN and the rest 0 where nothing is to be said.
  void operator()(const double* gram, const double* target, const int64_t* order,
                  const bool* vaccinated, double* weight, double* seen, bool* active) {
    for (int64_t i = 0; i < T;
         i++, order += T - 1, target += T, weight += T, seen += T, active += T) {
      std::copy(gram + i * T, gram + (i + 1) * T, products.begin());
      double altered = std::max(gram[i * T + i], 0.), smallest = altered * (cancelled * cancelled);
      weight[i] = 1.;
      for (int64_t visit = 0; visit < T - 1; visit++) {
        auto j = order[visit];
        double their = std::sqrt(std::max(gram[j * T + j], 0.)),
               own = std::sqrt(std::max(altered, 0.)), dot = products[j];
        if (!(altered > smallest && their > 0. && vaccinated[i])) continue;
        double bound = std::min(target[j], limit),
               phi = std::min(std::max(dot / (own * their), -1.), 1.);
        double goal = std::max(bound, -limit), sine = std::sqrt(1. - goal * goal);
        seen[j] = phi;
        if (!(phi < bound)) continue;
        double step = own * (goal * std::sqrt(1. - phi * phi) - phi * sine) / (their * sine);
        weight[j] = step;
        active[j] = true;
        altered = altered + step * (2. * dot + step * their * their);
        for (int64_t l = 0; l < T; l++) products[l] = products[l] + step * gram[j * T + l];
      }
    }
  }
};

static bool are_within(const Tensor& index, int64_t size) {
  if (!is_plain(index, at::kLong) || !index.is_contiguous()) return false;
  auto* first = index.const_data_ptr<int64_t>();
  return std::all_of(first, first + index.numel(),
                     [&](int64_t one) { return one >= 0 && one < size; });
}
static bool is_block(const Tensor& t, at::ScalarType dtype, at::IntArrayRef sizes) {
  return is_plain(t, dtype) && t.sizes() == sizes && t.is_contiguous();
}

static std::optional<std::tuple<Tensor, Tensor, Tensor>> sweep(const Tensor& given,
                                                               const Tensor& given_target,
                                                               const Tensor& given_order,
                                                               const Tensor& vaccinated,
                                                               double cancelled, double limit) {
  if (given.dim() != 3 || !given.numel()) return {};
  auto K = given.size(0), T = given.size(1);
  auto gram = given.contiguous(), target = given_target.contiguous(),
       order = given_order.contiguous();
  if (!is_block(gram, at::kDouble, {K, T, T}) || !is_block(target, at::kDouble, {K, T, T}) ||
      !is_block(order, at::kLong, {K, T, T - 1}) || !are_within(order, T) ||
      !is_block(vaccinated, at::kBool, {T}))
    return {};
  auto coefficients = at::zeros_like(gram),
       observed = at::full_like(gram, std::numeric_limits<double>::quiet_NaN()),
       active = at::zeros_like(gram, gram.options().dtype(at::kBool));
  Sweep run{T, cancelled, limit};
  for (int64_t k = 0, at = 0; k < K; k++, at += T * T)
    run(gram.const_data_ptr<double>() + at, target.const_data_ptr<double>() + at,
        order.const_data_ptr<int64_t>() + k * T * (T - 1), vaccinated.const_data_ptr<bool>(),
        coefficients.mutable_data_ptr<double>() + at, observed.mutable_data_ptr<double>() + at,
        active.mutable_data_ptr<bool>() + at);
  return std::tuple(coefficients, observed, active);
}

// `weigh` of pairwise.py for some components and tasks of all, from their Gram matrices: weights,
// targets, which pairs were active. Writes moving averages to `following`.
static std::optional<std::tuple<Tensor, Tensor, Tensor>> weigh(
    const Tensor& gram, const Tensor& targets, const Tensor& orders, const Tensor& vaccinated,
    const Tensor& components, const Tensor& present, const Tensor& following, double beta,
    double cancelled, double limit) {
  if (gram.dim() != 3 || targets.dim() != 3 || !gram.numel()) return {};
  auto K = gram.size(0), T = gram.size(1), all = targets.size(0), tasks = targets.size(1);
  if (!is_block(gram, at::kDouble, {K, T, T}) ||
      !is_block(targets, at::kDouble, {all, tasks, tasks}) ||
      !is_block(following, at::kDouble, {all, tasks, tasks}) ||
      !is_block(orders, at::kLong, {all, T, T - 1}))
    return {};
  if (!are_within(orders, T) || !are_within(components, all) || !are_within(present, tasks) ||
      components.numel() != K || present.numel() != T || !is_block(vaccinated, at::kBool, {tasks}))
    return {};
  auto* given = gram.const_data_ptr<double>();
  if (!std::all_of(given, given + gram.numel(), [](double one) { return std::isfinite(one); }))
    return {};
  auto weights = at::zeros({K, T}, gram.options()), held = at::empty_like(gram),
       active = at::zeros_like(gram, gram.options().dtype(at::kBool));
  auto *task = present.const_data_ptr<int64_t>(), *component = components.const_data_ptr<int64_t>();
  auto* target = held.mutable_data_ptr<double>();
  std::vector<double> coefficients(T * T), seen(T * T);
  std::vector<char> chosen(T);
  for (int64_t i = 0; i < T; i++) chosen[i] = vaccinated.const_data_ptr<bool>()[task[i]];
  Sweep run{T, cancelled, limit};
  for (int64_t k = 0; k < K; k++, target += T * T) {
    auto place = [&](int64_t i, int64_t j) {
      return (component[k] * tasks + task[i]) * tasks + task[j];
    };
    for (int64_t i = 0; i < T; i++)
      for (int64_t j = 0; j < T; j++)
        target[i * T + j] = targets.const_data_ptr<double>()[place(i, j)];
    std::fill(coefficients.begin(), coefficients.end(), 0.);
    std::fill(seen.begin(), seen.end(), std::numeric_limits<double>::quiet_NaN());
    run(given + k * T * T, target, orders.const_data_ptr<int64_t>() + component[k] * T * (T - 1),
        reinterpret_cast<const bool*>(chosen.data()), coefficients.data(), seen.data(),
        active.mutable_data_ptr<bool>() + k * T * T);
    auto* weight = weights.mutable_data_ptr<double>() + k * T;
    for (int64_t i = 0; i < T; i++)
      for (int64_t j = 0; j < T; j++) {
        weight[j] += coefficients[i * T + j];
        if (beta != 0. && !std::isnan(seen[i * T + j]))
          following.mutable_data_ptr<double>()[place(i, j)] =
              (1. - beta) * target[i * T + j] + beta * seen[i * T + j];
      }
  }
  return std::tuple(weights, held, active);
}

static uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The order of visits of pairwise.py, [K, T, T - 1].
static std::optional<Tensor> random_order(int64_t seed, const Tensor& step,
                                          const Tensor& components, const Tensor& tasks) {
  if (!is_plain(step, at::kLong) || step.numel() != 1 || !are_indices(components) ||
      !are_indices(tasks) || !tasks.numel())
    return {};
  auto K = components.numel(), T = tasks.numel();
  auto *component = components.const_data_ptr<int64_t>(), *task = tasks.const_data_ptr<int64_t>();
  auto out = at::empty({K, T, T - 1}, tasks.options());
  auto* to = out.mutable_data_ptr<int64_t>();
  auto first = mix(static_cast<uint64_t>(*step.const_data_ptr<int64_t>()) * 0x9e3779b97f4a7c15ull +
                   static_cast<uint64_t>(seed));
  std::vector<std::pair<int64_t, int64_t>> keys(T);
  for (int64_t k = 0; k < K; k++) {
    auto start = mix(static_cast<uint64_t>(component[k]) + first);
    for (int64_t i = 0; i < T; i++) {
      auto own = mix(start + static_cast<uint64_t>(task[i]));
      for (int64_t j = 0; j < T; j++)
        keys[j] = {i == j ? std::numeric_limits<int64_t>::max()
                          : static_cast<int64_t>(mix(own + static_cast<uint64_t>(task[j]))),
                   j};
      std::sort(keys.begin(), keys.end());
      for (int64_t j = 0; j < T - 1; j++) *to++ = keys[j].second;
    }
  }
  return out;
}

}  // namespace gradvac

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace gradvac;
  m.def("products", &products);
  m.def("scales", &scales);
  m.def("lookup", &lookup);
  m.def("grams", &grams);
  m.def("combine", &combine);
  m.def("accumulate", &accumulate);
  m.def("sweep", &sweep);
  m.def("weigh", &weigh);
  m.def("random_order", &random_order);
  add_executor(m);
}
