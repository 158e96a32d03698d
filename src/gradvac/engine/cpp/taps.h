// Parameters of compiled regions (compiled.py): nodes that stand for them, and what a region is
// given.

#pragma once

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <memory>
#include <tuple>

#include "../../utils/native.h"

namespace gradvac {

namespace ag = torch::autograd;
namespace py = pybind11;

// What is noted at nodes of compiled regions of ours (`RUN` of graph.py).
constexpr auto MARK = "gradvac";
inline PyObject* notes_of(const ag::Node* node) {
  return static_cast<ag::PyAnomalyMetadata*>(const_cast<ag::Node*>(node)->metadata())->dict();
}
inline PyObject* mark_of(const ag::Node* node) {
  return PyDict_GetItemString(notes_of(node), MARK);
}

struct ProductTap : ag::Node {  // `GradvacProduct`
  std::string name() const override { return "gradvac::ProductTap"; }
  ag::variable_list apply(ag::variable_list&& given) override {
    ag::variable_list gradients(num_outputs());
    if (!given[0].defined() || !given[1].defined()) return gradients;
    auto gradient = given[0].flatten(0, -2), x = given[1].flatten(0, -2);
    if (task_should_compute_output(1)) gradients[1] = gradient.t().matmul(x);
    if (num_outputs() > 2 && task_should_compute_output(2)) gradients[2] = gradient.sum(0);
    return gradients;
  }
};

struct LookupTap : ag::Node {  // `GradvacLookup`
  int64_t padding, num_rows;
  LookupTap(int64_t padding_, int64_t num_rows_) : padding(padding_), num_rows(num_rows_) {}
  std::string name() const override { return "gradvac::LookupTap"; }
  ag::variable_list apply(ag::variable_list&& given) override {
    ag::variable_list gradients(num_outputs());
    if (given[0].defined() && given[1].defined() && task_should_compute_output(1))
      gradients[1] =
          at::embedding_dense_backward(given[0], given[1].to(at::kLong), num_rows, padding, false);
    return gradients;
  }
};

// Nodes are counted in one of two ways, by the version of torch.
template <class Tap, class... Values>
auto make_tap(Values... values) {
  if constexpr (std::is_same_v<decltype(std::declval<Tap&>().getptr()), std::shared_ptr<ag::Node>>)
    return std::make_shared<Tap>(values...);
  else
    return c10::make_intrusive<Tap>(values...);
}

// An output of a tap: zeros without memory.
template <class Pointer>
Tensor placeholder(const Pointer& node, const py::handle& shape, at::ScalarType dtype,
                   at::Device device) {
  using Key = std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>;
  static auto& zeros = *new std::map<Key, Tensor>;  // for ever: nothing is freed after Python's end
  auto& zero = zeros[{dtype, device.type(), device.index()}];
  if (!zero.defined()) zero = at::zeros({}, at::TensorOptions(dtype).device(device));
  Tensor given;
  {
    at::AutoDispatchBelowADInplaceOrView plain;  // of nobody's memory
    given = zero.expand(shape.cast<std::vector<int64_t>>());
  }
  if (at::GradMode::is_enabled()) ag::set_history(given, node);
  return given;
}

// What a region is given for its parameters: `region_inputs` of compiled.py.
inline Tensors region_inputs(const Tensor& anchor, const py::tuple& requests) {
  Tensors given;
  for (auto request : requests) {
    auto parts = py::reinterpret_borrow<py::tuple>(request);
    auto parameter = parts[0].cast<Tensor>();
    switch (parts.size()) {
      case 1:
        given.push_back(parameter.detach());
        break;
      case 2: {
        given.push_back(parameter.expand(parts[1].cast<std::vector<int64_t>>()));
        if (auto* node = given.back().grad_fn().get())
          PyDict_SetItemString(notes_of(node), MARK, Py_None);
        break;
      }
      case 4: {
        auto padding = parts[1].cast<int64_t>();
        auto node = make_tap<LookupTap>(padding, parameter.size(0));
        node->set_next_edges(ag::collect_next_edges(anchor, parameter));
        PyDict_SetItemString(
            notes_of(node.get()), MARK,
            py::make_tuple(py::none(), py::make_tuple(padding, parameter.size(0)), py::dict())
                .ptr());
        given.push_back(placeholder(node, parts[2], parameter.scalar_type(), parameter.device()));
        given.push_back(placeholder(node, parts[3], at::kDouble, parameter.device()));
        break;
      }
      default: {
        auto node = make_tap<ProductTap>();
        auto dtype = parts[4].cast<at::ScalarType>();
        auto edges = parts[1].is_none()
                         ? ag::collect_next_edges(anchor, parameter)
                         : ag::collect_next_edges(anchor, parameter, parts[1].cast<Tensor>());
        node->set_next_edges(std::move(edges));
        for (auto shape : {parts[2], parts[3]})
          given.push_back(placeholder(node, shape, dtype, parameter.device()));
      }
    }
  }
  return given;
}

}  // namespace gradvac
