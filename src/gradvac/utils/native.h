// What native.cpp computes of tensors on a CPU, for executor.cpp.
//
// T tasks, B rows, N entries, O outputs, I inputs, D width, P entries of a parameter

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradvac {

using at::Tensor;
using Tensors = std::vector<Tensor>;

inline bool is_ordinary(const Tensor& t, at::ScalarType dtype) {
  // No subclass that does things its own way, no zeros without memory.
  return t.defined() && t.layout() == at::kStrided && t.scalar_type() == dtype && t.has_storage() &&
         !t.is_conj() && !t.is_neg() && !t._is_zerotensor() &&
         !t.key_set().has(c10::DispatchKey::Python);
}
inline bool is_plain(const Tensor& t, at::ScalarType dtype) {
  return is_ordinary(t, dtype) && t.is_cpu();
}
// Whether `.grad` of a leaf is to be of the dtype that the leaf has, or of any.
inline bool has_own_dtype(const Tensor& leaf) {
  return leaf.grad_dtype().value_or(leaf.scalar_type()) == leaf.scalar_type();
}
inline bool is_real(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

// Whether an index has a task of 0..T-1 for every row.
bool fits(const Tensor& index, int64_t num_tasks);

struct Rows {  // whose the rows of a batch are
  Tensor index;
  const int64_t* tasks;
  std::vector<int64_t> counts, starts;
  std::vector<int64_t> order;  // the rows of the first task, of the second, ...
  int64_t num, most = 0;
  Rows(const Tensor& index, int64_t num_tasks);
};

// Adds to `out` [T, O, I] or [T, I, O] the products of what a linear layer got, x [N, I] and g [N,
// O], by task; `is_first`: there is nothing yet.
void add_products(const Rows& rows, const Tensor& x, const Tensor& g, bool is_transposed,
                  const Tensor& out, bool is_first);

// Adds to `out` [T, D] the sums of g, of g x, of g x scale, or of g (x - mean) scale; entries as
// [N, D], factors as [N].
void add_sums(const Rows& rows, const Tensor& out, const Tensor& g,
              const std::optional<Tensor>& x = {}, const std::optional<Tensor>& mean = {},
              const std::optional<Tensor>& scale = {});

constexpr int64_t MOST_ROWS = int64_t(1) << 24;  // of a table

// Numbers the different tokens, in the order in which they come; -1 stays.
void number_tokens(std::vector<int64_t>& tokens, int64_t num_rows, std::vector<int64_t>& found);

// Adds the values [N, D] of tokens [N] to tables [T, V, D]; entries come row by row, those of -1
// are left out.
void add_lookups(const Rows& rows, const Tensor& out, const Tensor& values, const int64_t* tokens);

// Adds the upper half of the inner products of a block [T, P] to `out` [T, T].
void add_gram(const Tensor& block, double* out);
void mirror(double* gram, int64_t num_tasks);

// sum_t weights[t] block[t], written over `out` [P] or added to it.
void combine_to(const Tensor& block, const double* weights, const Tensor& out, bool is_added);

void add_executor(pybind11::module_& m);

}  // namespace gradvac
