// What a step computes of many small tensors on a CPU, without Python in between; see native.py.
//
// Public interfaces of ATen and pybind11 alone. A function that is given what it does not know (another
// device, dtype or layout) returns None, and Python's own way is taken, which is the reference.
//
// K components, T tasks, B rows, N entries, n alike, O outputs, I inputs, D width, P entries of a parameter

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Pair = std::pair<Tensor, std::optional<Tensor>>;

namespace {

bool is_plain(const Tensor& t, at::ScalarType dtype) {
  return t.defined() && t.device().is_cpu() && t.layout() == at::kStrided && t.scalar_type() == dtype && t.has_storage() &&
         !t.is_conj() && !t.is_neg() && !t.key_set().has(c10::DispatchKey::Python);  // no subclass that does things its own way
}
bool is_real(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }
bool are_indices(const Tensor& t) { return is_plain(t, at::kLong) && t.dim() == 1 && t.is_contiguous(); }

// Of so many numbers torch's own threads make more than loops on one.
bool is_for_threads(int64_t numel) { return numel > (1 << 20) && at::get_num_threads() > 1; }

// -- entries by task ----------------------------------------------------------------------------------

struct Rows {  // whose the rows of a batch are
  const int64_t* tasks;
  std::vector<int64_t> counts, starts, order;  // order: the rows of the first task, of the second, ...
  int64_t num, most = 0;
  Rows(const Tensor& index, int64_t num_tasks) : tasks(index.const_data_ptr<int64_t>()), counts(num_tasks), starts(num_tasks), num(index.numel()) {
    for (int64_t r = 0; r < num; r++) counts[tasks[r]]++;
    for (int64_t t = 1; t < num_tasks; t++) starts[t] = starts[t - 1] + counts[t - 1];
    for (auto count : counts) most = std::max(most, count);
    order.resize(num);
    auto next = starts;
    for (int64_t r = 0; r < num; r++) order[next[tasks[r]]++] = r;
  }
};

bool fits(const Tensor& index, int64_t num_tasks) {
  if (!are_indices(index) || !index.numel() || num_tasks < 1) return false;
  auto* tasks = index.const_data_ptr<int64_t>();
  return std::all_of(tasks, tasks + index.numel(), [&](int64_t t) { return t >= 0 && t < num_tasks; });
}

// The entries [B * s, W] of every task, padded with zeros to those of the largest: [T, most * s, W].
void gather(const Tensor& from, const Rows& rows, Tensor& to) {
  auto bytes = from.nbytes() / rows.num;
  auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  for (size_t t = 0; t < rows.counts.size(); t++) {
    for (int64_t r = 0; r < rows.counts[t]; r++, target += bytes) std::memcpy(target, source + rows.order[rows.starts[t] + r] * bytes, bytes);
    auto missing = (rows.most - rows.counts[t]) * bytes;
    std::memset(target, 0, missing);
    target += missing;
  }
}

template <class Number, class Value>
INLINE void sum_by_task(const Rows& rows, int64_t per_row, int64_t width, double* sums, Number* out, Value value) {
  std::fill(sums, sums + rows.counts.size() * width, 0.);
  for (int64_t r = 0, n = 0; r < rows.num; r++) {
    auto* to = sums + rows.tasks[r] * width;
    for (int64_t s = 0; s < per_row; s++, n++) for (int64_t d = 0; d < width; d++) to[d] += value(n, d);
  }
  for (size_t k = 0; k < rows.counts.size() * width; k++) out[k] += static_cast<Number>(sums[k]);
}

template <class Number>
INLINE void add_sums(const Rows& rows, int64_t per_row, int64_t width, double* sums, Number* out, const Number* g, const Number* x, const Number* mean, const Number* scale) {
  if (!x) sum_by_task(rows, per_row, width, sums, out, [=](int64_t n, int64_t d) { return static_cast<double>(g[n * width + d]); });
  else if (!scale) sum_by_task(rows, per_row, width, sums, out, [=](int64_t n, int64_t d) { return static_cast<double>(g[n * width + d] * x[n * width + d]); });
  else if (!mean) sum_by_task(rows, per_row, width, sums, out, [=](int64_t n, int64_t d) { return static_cast<double>(g[n * width + d] * (x[n * width + d] * scale[n])); });
  else sum_by_task(rows, per_row, width, sums, out, [=](int64_t n, int64_t d) { return static_cast<double>(g[n * width + d] * ((x[n * width + d] - mean[n]) * scale[n])); });
}
#define SUMS(Number) FOR_EACH_PROCESSOR void sums_of(const Rows& rows, int64_t per_row, int64_t width, double* sums, Number* out, const Number* g, const Number* x, const Number* mean, const Number* scale) { add_sums(rows, per_row, width, sums, out, g, x, mean, scale); }
SUMS(float)
SUMS(double)

template <class Number>
const Number* data(const std::optional<Tensor>& t) { return t ? t->const_data_ptr<Number>() : nullptr; }

// Adds to `out` [T, D] what a junction contributes; without x: the sums of its output gradients.
void add_sums_of(const Rows& rows, std::vector<double>& scratch, const Tensor& out, const Tensor& g, const std::optional<Tensor>& x = {}, const std::optional<Tensor>& mean = {}, const std::optional<Tensor>& scale = {}) {
  auto width = out.size(-1), per_row = g.numel() / (rows.num * width);
  scratch.resize(rows.counts.size() * width);
  if (g.scalar_type() == at::kFloat) sums_of(rows, per_row, width, scratch.data(), out.mutable_data_ptr<float>(), g.const_data_ptr<float>(), data<float>(x), data<float>(mean), data<float>(scale));
  else sums_of(rows, per_row, width, scratch.data(), out.mutable_data_ptr<double>(), g.const_data_ptr<double>(), data<double>(x), data<double>(mean), data<double>(scale));
}

// -- junctions ----------------------------------------------------------------------------------------

// Task gradients of weights [n, T, O * I] and shifts [n, T, O] of linear layers that are alike; added up if they are one layer.
std::optional<Pair> products(const Tensors& inputs, const Tensors& gradients, const Tensor& index, int64_t num_tasks, bool is_transposed, bool has_shift, bool is_one) {
  if (inputs.empty() || inputs.size() != gradients.size() || !fits(index, num_tasks)) return {};
  auto dtype = inputs[0].scalar_type();
  if (!is_real(dtype) || inputs[0].dim() != 2 || gradients[0].dim() < 2) return {};
  auto B = index.numel(), N = inputs[0].size(0), I = inputs[0].size(1), O = gradients[0].size(-1);
  if (!N || !I || !O || N % B || is_for_threads(N * std::max(I, O))) return {};
  for (size_t i = 0; i < inputs.size(); i++)
    if (!is_plain(inputs[i], dtype) || !is_plain(gradients[i], dtype) || inputs[i].dim() != 2 || inputs[i].size(0) != N || inputs[i].size(1) != I || gradients[i].dim() < 2 || gradients[i].size(-1) != O || gradients[i].numel() != N * O) return {};
  at::AutoDispatchBelowADInplaceOrView plain;  // nothing here is differentiated
  Rows rows(index, num_tasks);
  auto T = num_tasks, n = is_one ? 1 : static_cast<int64_t>(inputs.size()), per_row = N / B, most = rows.most * per_row;
  bool is_padded = most * T * 4 <= N * 5;  // else every task by itself
  auto options = inputs[0].options();
  auto height = is_transposed ? O : I, width = is_transposed ? I : O;
  auto out = at::empty({n, T, height, width}, options);
  auto shifts = has_shift ? at::zeros({n, T, O}, options) : Tensor();
  auto x = at::empty({is_padded ? T * most : N, I}, options), g = at::empty({is_padded ? T * most : N, O}, options);
  std::vector<double> scratch;
  for (size_t i = 0; i < inputs.size(); i++) {
    auto given_x = inputs[i].contiguous(), given_g = gradients[i].contiguous();
    auto result = out.select(0, is_one ? 0 : i);
    bool is_first = !is_one || i == 0;
    if (is_padded) {
      gather(given_x, rows, x);
      gather(given_g, rows, g);
      auto by_x = x.view({T, most, I}), by_g = g.view({T, most, O});
      auto left = is_transposed ? by_g : by_x, right = is_transposed ? by_x : by_g;
      if (is_first) at::bmm_out(result, left.transpose(1, 2), right);
      else result.baddbmm_(left.transpose(1, 2), right);
    } else {
      for (int64_t t = 0; t < T; t++) {
        auto count = rows.counts[t] * per_row;
        auto part = result.select(0, t);
        if (is_first) part.zero_();
        if (!count) continue;
        auto copy = [&](const Tensor& from, Tensor& to) {
          auto bytes = from.nbytes() / B;
          auto* target = static_cast<char*>(to.mutable_data_ptr());
          for (int64_t r = 0; r < rows.counts[t]; r++, target += bytes) std::memcpy(target, static_cast<const char*>(from.const_data_ptr()) + rows.order[rows.starts[t] + r] * bytes, bytes);
          return to.narrow(0, 0, count);
        };
        auto by_x = copy(given_x, x), by_g = copy(given_g, g);
        part.addmm_(is_transposed ? by_g.t() : by_x.t(), is_transposed ? by_x : by_g);
      }
    }
    if (has_shift) add_sums_of(rows, scratch, shifts.select(0, is_one ? 0 : i), given_g);
  }
  return Pair(out.view({n, T, -1}), has_shift ? std::optional<Tensor>(shifts) : std::nullopt);
}

// Those of scales [n, T, D], and of shifts, of normalisations (with `scale`, perhaps `mean`) or of factors that are alike.
std::optional<Pair> scales(const Tensors& inputs, const Tensors& means, const Tensors& deviations, const Tensors& gradients, const Tensor& index, int64_t num_tasks, bool has_shift, bool is_one) {
  if (inputs.empty() || inputs.size() != gradients.size() || !fits(index, num_tasks)) return {};
  auto dtype = inputs[0].scalar_type();
  if (!is_real(dtype) || gradients[0].dim() < 2) return {};
  auto D = gradients[0].size(-1), B = index.numel(), entries = gradients[0].numel();
  if (!entries || (entries / D) % B || is_for_threads(entries)) return {};
  for (auto* every : {&means, &deviations})
    if (!every->empty() && every->size() != inputs.size()) return {};
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!is_plain(inputs[i], dtype) || !is_plain(gradients[i], dtype) || inputs[i].sizes() != gradients[0].sizes() || gradients[i].sizes() != gradients[0].sizes()) return {};
    for (auto* every : {&means, &deviations})
      if (!every->empty() && (!is_plain((*every)[i], dtype) || (*every)[i].numel() * D != entries)) return {};
  }
  at::AutoDispatchBelowADInplaceOrView plain;  // nothing here is differentiated
  Rows rows(index, num_tasks);
  int64_t n = is_one ? 1 : inputs.size();
  auto out = at::zeros({n, num_tasks, D}, inputs[0].options());
  auto shifts = has_shift ? at::zeros_like(out) : Tensor();
  std::vector<double> scratch;
  for (size_t i = 0; i < inputs.size(); i++) {
    auto g = gradients[i].contiguous();
    auto at_i = [&](const Tensors& every) { return every.empty() ? std::nullopt : std::optional<Tensor>(every[i].contiguous()); };
    add_sums_of(rows, scratch, out.select(0, is_one ? 0 : i), g, at_i(inputs), at_i(means), at_i(deviations));
    if (has_shift) add_sums_of(rows, scratch, shifts.select(0, is_one ? 0 : i), g);
  }
  return Pair(out, has_shift ? std::optional<Tensor>(shifts) : std::nullopt);
}

// The tokens of a batch, and task gradients of their rows alone, [T, number of tokens, D].
std::optional<std::pair<Tensor, Tensor>> lookup(const Tensor& values, const Tensor& tokens, const Tensor& index, int64_t num_tasks, int64_t num_rows) {
  auto dtype = values.scalar_type();
  if (!is_real(dtype) || !is_plain(values, dtype) || values.dim() != 2 || !are_indices(tokens) || !fits(index, num_tasks)) return {};
  auto N = tokens.numel(), B = index.numel(), D = values.size(1);
  if (values.size(0) != N || !N || N % B || num_rows > (int64_t(1) << 24)) return {};
  auto* token = tokens.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < N; n++)
    if (token[n] < 0 || token[n] >= num_rows) return {};
  thread_local std::vector<int32_t> slots;  // -1 but in here
  if (static_cast<int64_t>(slots.size()) < num_rows) slots.resize(num_rows, -1);
  std::vector<int64_t> found;
  found.reserve(N);  // nothing may fail while slots are taken
  std::vector<int32_t> slot_of(N);
  for (int64_t n = 0; n < N; n++) {
    auto& slot = slots[token[n]];
    if (slot < 0) { slot = found.size(); found.push_back(token[n]); }
    slot_of[n] = slot;
  }
  for (auto one : found) slots[one] = -1;
  auto U = static_cast<int64_t>(found.size()), per_row = N / B;
  auto given = values.contiguous();
  auto out = at::zeros({num_tasks, U, D}, values.options());
  auto* tasks = index.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(dtype, "lookup", [&] {
    auto* from = given.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    for (int64_t n = 0; n < N; n++) {
      auto* row = to + (tasks[n / per_row] * U + slot_of[n]) * D;
      for (int64_t d = 0; d < D; d++) row[d] += from[n * D + d];
    }
  });
  auto unique = at::empty({U}, tokens.options());
  std::memcpy(unique.mutable_data_ptr<int64_t>(), found.data(), U * sizeof(int64_t));
  return std::pair(unique, out);
}

// -- Gram matrices and combinations -------------------------------------------------------------------

typedef double Lanes __attribute__((vector_size(32)));
constexpr int64_t CHUNK = 256;

INLINE Lanes load(const double* from) { Lanes v; std::memcpy(&v, from, sizeof v); return v; }
INLINE double sum(Lanes v) { return (v[0] + v[1]) + (v[2] + v[3]); }

template <class Number>
INLINE void add_gram(const Number* block, int64_t T, int64_t P, double* scratch, double* out) {
  for (int64_t start = 0; start < P; start += CHUNK) {
    auto size = std::min(CHUNK, P - start), whole = (size + 3) / 4 * 4;
    for (int64_t t = 0; t < T; t++) {
      auto* to = scratch + t * CHUNK;
      auto* from = block + t * P + start;
      for (int64_t c = 0; c < size; c++) to[c] = from[c];
      for (int64_t c = size; c < whole; c++) to[c] = 0.;
    }
    for (int64_t i = 0; i < T; i++) {
      auto* a = scratch + i * CHUNK;
      int64_t j = i;
      for (; j + 4 <= T; j += 4) {
        auto* b = scratch + j * CHUNK;
        Lanes s0{}, s1{}, s2{}, s3{};
        for (int64_t c = 0; c < whole; c += 4) {
          auto own = load(a + c);
          s0 += own * load(b + c);
          s1 += own * load(b + CHUNK + c);
          s2 += own * load(b + 2 * CHUNK + c);
          s3 += own * load(b + 3 * CHUNK + c);
        }
        out[i * T + j] += sum(s0);
        out[i * T + j + 1] += sum(s1);
        out[i * T + j + 2] += sum(s2);
        out[i * T + j + 3] += sum(s3);
      }
      for (; j < T; j++) {
        auto* b = scratch + j * CHUNK;
        Lanes s{};
        for (int64_t c = 0; c < whole; c += 4) s += load(a + c) * load(b + c);
        out[i * T + j] += sum(s);
      }
    }
  }
}

template <class Number>
INLINE void weighted_sum(const Number* block, const Number* weights, int64_t T, int64_t P, Number* out) {
  for (int64_t start = 0; start < P; start += CHUNK) {
    auto size = std::min(CHUNK, P - start);
    for (int64_t c = 0; c < size; c++) out[start + c] = weights[0] * block[start + c];
    for (int64_t t = 1; t < T; t++) for (int64_t c = 0; c < size; c++) out[start + c] += weights[t] * block[t * P + start + c];
  }
}
#define OF_BLOCKS(Number)                                                                                                                        \
  FOR_EACH_PROCESSOR void gram_of(const Number* block, int64_t T, int64_t P, double* scratch, double* out) { add_gram(block, T, P, scratch, out); } \
  FOR_EACH_PROCESSOR void combination_of(const Number* block, const Number* weights, int64_t T, int64_t P, Number* out) { weighted_sum(block, weights, T, P, out); }
OF_BLOCKS(float)
OF_BLOCKS(double)

bool are_blocks(const Tensors& blocks, const std::vector<int64_t>& components, int64_t num_components) {
  if (blocks.empty()) return false;
  size_t number = 0;
  int64_t numel = 0;
  for (auto& block : blocks) {
    if (!is_real(block.scalar_type()) || !is_plain(block, block.scalar_type()) || block.dim() != 3 || !block.is_contiguous() || block.size(1) != blocks[0].size(1) || !block.size(1)) return false;
    number += block.size(0);
    numel += block.numel();
  }
  return !is_for_threads(numel) && number == components.size() && std::all_of(components.begin(), components.end(), [&](int64_t k) { return k >= 0 && k < num_components; });
}

// [K, T, T] of task gradients [n, T, P] whose components are given, in float64.
std::optional<Tensor> grams(const Tensors& blocks, const std::vector<int64_t>& components, int64_t num_components) {
  if (!are_blocks(blocks, components, num_components)) return {};
  auto T = blocks[0].size(1);
  auto out = at::zeros({num_components, T, T}, blocks[0].options().dtype(at::kDouble));
  auto* to = out.mutable_data_ptr<double>();
  std::vector<double> scratch(T * CHUNK);
  size_t number = 0;
  for (auto& block : blocks) {
    auto P = block.size(2);
    AT_DISPATCH_FLOATING_TYPES(block.scalar_type(), "grams", [&] {
      for (int64_t i = 0; i < block.size(0); i++) gram_of(block.const_data_ptr<scalar_t>() + i * T * P, T, P, scratch.data(), to + components[number++] * T * T);
    });
  }
  for (int64_t k = 0; k < num_components; k++)
    for (int64_t i = 0; i < T; i++)
      for (int64_t j = 0; j < i; j++) to[(k * T + i) * T + j] = to[(k * T + j) * T + i];
  return out;
}

// sum_t weights[k, t] g_t of every parameter, [P] each.
std::optional<Tensors> combine(const Tensors& blocks, const std::vector<int64_t>& components, const Tensor& weights) {
  if (!is_plain(weights, weights.scalar_type()) || !is_real(weights.scalar_type()) || weights.dim() != 2 || !are_blocks(blocks, components, weights.size(0)) || weights.size(1) != blocks[0].size(1)) return {};
  at::AutoDispatchBelowADInplaceOrView plain;  // parts of one result are no views, as optimizers of old take for granted
  auto T = weights.size(1);
  Tensors updates;
  updates.reserve(components.size());
  for (auto& block : blocks) {
    auto n = block.size(0), P = block.size(2);
    auto update = at::empty({n, P}, block.options());
    auto own = weights.to(block.scalar_type()).contiguous();
    AT_DISPATCH_FLOATING_TYPES(block.scalar_type(), "combine", [&] {
      for (int64_t i = 0; i < n; i++) combination_of(block.const_data_ptr<scalar_t>() + i * T * P, own.const_data_ptr<scalar_t>() + components[updates.size() + i] * T, T, P, update.mutable_data_ptr<scalar_t>() + i * P);
    });
    for (int64_t i = 0; i < n; i++) updates.push_back(at::as_strided(update, {P}, {1}, i * P));
  }
  return updates;
}

// Adds updates to `.grad` of leaves without hooks; those that do not fit are left, and their places returned.
std::vector<int64_t> accumulate(const Tensors& leaves, const Tensors& updates) {
  std::vector<int64_t> left;
  at::AutoDispatchBelowADInplaceOrView plain;
  for (size_t i = 0; i < leaves.size(); i++) {
    auto &leaf = leaves[i], &update = updates.at(i);
    if (!is_plain(leaf, update.scalar_type()) || !is_plain(update, update.scalar_type()) || !leaf.is_contiguous() || !update.is_contiguous() || leaf.numel() != update.numel() || !leaf.is_leaf() || !leaf.requires_grad()) {
      left.push_back(i);
      continue;
    }
    auto own = at::as_strided(update, leaf.sizes(), leaf.strides(), update.storage_offset());
    auto& grad = leaf.mutable_grad();
    if (!grad.defined()) grad = own;
    else if (is_plain(grad, own.scalar_type()) && !grad.requires_grad() && grad.sizes() == own.sizes()) { grad.add_(own); grad.unsafeGetTensorImpl()->bump_version(); }
    else left.push_back(i);
  }
  return left;
}

// -- rules --------------------------------------------------------------------------------------------

// The sweep of pairwise.py, row by row: the same operations in the same order, to the last bit.
std::optional<std::tuple<Tensor, Tensor, Tensor>> sweep(const Tensor& given, const Tensor& given_target, const Tensor& given_order, const Tensor& given_vaccinated, double cancelled, double limit) {
  if (!is_plain(given, at::kDouble) || !is_plain(given_target, at::kDouble) || !is_plain(given_order, at::kLong) || !is_plain(given_vaccinated, at::kBool) || given.dim() != 3 || given.numel() == 0) return {};
  auto K = given.size(0), T = given.size(1);
  if (given.size(2) != T || given_target.sizes() != given.sizes() || given_order.sizes() != at::IntArrayRef({K, T, T - 1}) || given_vaccinated.sizes() != at::IntArrayRef({T})) return {};
  auto grams = given.contiguous(), targets = given_target.contiguous(), orders = given_order.contiguous(), chosen = given_vaccinated.contiguous();
  auto* order = orders.const_data_ptr<int64_t>();
  if (!std::all_of(order, order + orders.numel(), [&](int64_t j) { return j >= 0 && j < T; })) return {};
  auto coefficients = at::zeros_like(grams), observed = at::full_like(grams, std::numeric_limits<double>::quiet_NaN()), active = at::zeros_like(grams, grams.options().dtype(at::kBool));
  auto *gram = grams.const_data_ptr<double>(), *target = targets.const_data_ptr<double>();
  auto *weight = coefficients.mutable_data_ptr<double>(), *seen = observed.mutable_data_ptr<double>();
  auto* is_active = active.mutable_data_ptr<bool>();
  std::vector<double> products(T);
  for (int64_t k = 0; k < K; k++, gram += T * T) {
    for (int64_t i = 0; i < T; i++, order += T - 1, target += T, weight += T, seen += T, is_active += T) {
      std::copy(gram + i * T, gram + (i + 1) * T, products.begin());
      double altered = std::max(gram[i * T + i], 0.), smallest = altered * (cancelled * cancelled);
      weight[i] = 1.;
      for (int64_t visit = 0; visit < T - 1; visit++) {
        auto j = order[visit];
        double their = std::sqrt(std::max(gram[j * T + j], 0.)), own = std::sqrt(std::max(altered, 0.)), dot = products[j];
        if (!(altered > smallest && their > 0. && chosen.const_data_ptr<bool>()[i])) continue;
        double phi = std::min(std::max(dot / (own * their), -1.), 1.), goal = std::min(std::max(target[j], -limit), limit), sine = std::sqrt(1. - goal * goal);
        seen[j] = phi;
        if (!(phi < target[j])) continue;
        double step = own * (goal * std::sqrt(1. - phi * phi) - phi * sine) / (their * sine);
        weight[j] = step;
        is_active[j] = true;
        altered = altered + step * (2. * dot + step * their * their);
        for (int64_t l = 0; l < T; l++) products[l] = products[l] + step * gram[j * T + l];
      }
    }
  }
  return std::tuple(coefficients, observed, active);
}

uint64_t mix(uint64_t x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The order of visits of pairwise.py, [K, T, T - 1].
std::optional<Tensor> random_order(int64_t seed, const Tensor& step, const Tensor& components, const Tensor& tasks) {
  if (!is_plain(step, at::kLong) || step.numel() != 1 || !are_indices(components) || !are_indices(tasks) || !tasks.numel()) return {};
  auto K = components.numel(), T = tasks.numel();
  auto *component = components.const_data_ptr<int64_t>(), *task = tasks.const_data_ptr<int64_t>();
  auto out = at::empty({K, T, T - 1}, tasks.options());
  auto* to = out.mutable_data_ptr<int64_t>();
  auto first = mix(static_cast<uint64_t>(*step.const_data_ptr<int64_t>()) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(seed));
  std::vector<std::pair<int64_t, int64_t>> keys(T);
  for (int64_t k = 0; k < K; k++) {
    auto start = mix(static_cast<uint64_t>(component[k]) + first);
    for (int64_t i = 0; i < T; i++) {
      auto own = mix(start + static_cast<uint64_t>(task[i]));
      for (int64_t j = 0; j < T; j++) keys[j] = {i == j ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(mix(own + static_cast<uint64_t>(task[j]))), j};
      std::sort(keys.begin(), keys.end());
      for (int64_t j = 0; j < T - 1; j++) *to++ = keys[j].second;
    }
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("products", &products);
  m.def("scales", &scales);
  m.def("lookup", &lookup);
  m.def("grams", &grams);
  m.def("combine", &combine);
  m.def("accumulate", &accumulate);
  m.def("sweep", &sweep);
  m.def("random_order", &random_order);
}
