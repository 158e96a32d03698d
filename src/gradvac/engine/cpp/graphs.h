// Reads autograd graphs: what distinguishes them, as numbers.
//
// Beside ATen it knows the nodes of torch by their fields (generated/Functions.h). That is no
// public interface, so a node that is not of the expected kind is never read: whoever asks is told
// so, and Python's own way is taken, the reference.

#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <cstring>
#include <typeindex>
#include <unordered_map>

#include "taps.h"

namespace gradvac {

namespace gen = torch::autograd::generated;

// Operations, how they are connected, their settings, parameters, and all sizes, as numbers.
struct Content {
  std::vector<int64_t> numbers;
  size_t print = 0;
  bool is_known = true;  // of every node it is known what distinguishes it

  void put(int64_t number) { numbers.push_back(number); }
  void put(const void* address) { put(reinterpret_cast<int64_t>(address)); }
  void put(const c10::SymInt& number) {
    number.is_symbolic() ? is_known = false : (put(number.as_int_unchecked()), true);
  }
  void put(const at::Scalar& number) {
    auto value = number.isComplex() ? 0. : number.toDouble();
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    put(bits);
    is_known &= !number.isComplex() && !number.isSymbolic();
  }
  void put(const ag::SavedVariable& saved) {
    put(int64_t(saved.has_hooks() || (saved.get_raw_data() && saved.get_raw_data()->defined())));
  }
  template <class T>
  void put(const std::optional<T>& value) {
    put(int64_t(value.has_value()));
    if (value) put(*value);
  }
  template <class T>
  void put(const std::vector<T>& every) {
    put(int64_t(every.size()));
    for (auto& one : every) put(one);
  }
  template <class T>
  void put(const c10::OptionalArray<T>& every) {
    put(every.list);
  }
  void put(const at::TensorGeometry& one) {
    put(one.sym_sizes().vec());
    put(one.sym_strides().vec());
    put(one.sym_storage_offset());
  }

  void close() {
    print = numbers.size();
    for (auto number : numbers)
      print = (print ^ size_t(number)) * 0x9e3779b97f4a7c15ull, print ^= print >> 29;
  }
  bool operator==(const Content& other) const { return numbers == other.numbers; }
};

using Read = void (*)(const ag::Node*, Content&);

template <class Node, auto... fields>
std::pair<std::type_index, Read> reads() {
  return {typeid(Node), [](const ag::Node* node, Content& to) {
            (to.put(static_cast<const Node*>(node)->*fields), ...);
          }};
}
#define OF(Node, field) &gen::Node::field
#define DIM(Node) reads<gen::Node, OF(Node, dim)>()
#define DIM_KEPT(Node) reads<gen::Node, OF(Node, dim), OF(Node, keepdim)>()

// The settings of graph.py of nodes that have any, and factors that this file takes for 1.
inline const std::unordered_map<std::type_index, Read>& settings() {
  static const std::unordered_map<std::type_index, Read> every = {
      DIM(CatBackward0),
      DIM(StackBackward0),
      DIM(UnbindBackward0),
      DIM(SplitBackward0),
      DIM(SplitWithSizesBackward0),
      DIM(UnsafeSplitBackward0),
      DIM(SliceBackward0),
      DIM(UnsqueezeBackward0),
      DIM(UnsqueezeBackward1),
      DIM(SqueezeBackward1),
      DIM(SqueezeBackward2),
      DIM(SqueezeBackward4),
      DIM(SqueezeBackward5),
      DIM(SoftmaxBackward0),
      DIM(LogSoftmaxBackward0),
      DIM(SafeSoftmaxBackward0),
      DIM(GluBackward0),
      DIM(CumsumBackward0),
      DIM(CumprodBackward0),
      DIM(LogcumsumexpBackward0),
      DIM(GatherBackward0),
      DIM(ScatterBackward0),
      DIM(ScatterAddBackward0),
      DIM(IndexSelectBackward0),
      DIM(IndexAddBackward0),
      DIM(IndexCopyBackward0),
      DIM(SortBackward0),
      DIM(TopkBackward0),
      DIM(SliceScatterBackward0),
      DIM(FftR2CBackward0),
      DIM(FftC2RBackward0),
      DIM(FftC2CBackward0),
      DIM_KEPT(SumBackward1),
      DIM_KEPT(MeanBackward1),
      DIM_KEPT(VarBackward0),
      DIM_KEPT(StdBackward0),
      DIM_KEPT(VarMeanBackward0),
      DIM_KEPT(StdMeanBackward0),
      DIM_KEPT(LinalgVectorNormBackward0),
      DIM_KEPT(NormBackward1),
      DIM_KEPT(LogsumexpBackward0),
      DIM_KEPT(AmaxBackward0),
      DIM_KEPT(AminBackward0),
      DIM_KEPT(MaxBackward0),
      DIM_KEPT(MinBackward0),
      DIM_KEPT(ProdBackward1),
      reads<gen::AsStridedBackward0, OF(AsStridedBackward0, self_geometry),
            OF(AsStridedBackward0, size), OF(AsStridedBackward0, stride),
            OF(AsStridedBackward0, storage_offset)>(),
      reads<gen::PermuteBackward0, OF(PermuteBackward0, dims)>(),
      reads<gen::TransposeBackward0, OF(TransposeBackward0, dim0), OF(TransposeBackward0, dim1)>(),
      reads<gen::SelectBackward0, OF(SelectBackward0, dim), OF(SelectBackward0, index)>(),
      reads<gen::SelectScatterBackward0, OF(SelectScatterBackward0, dim),
            OF(SelectScatterBackward0, index)>(),
      reads<gen::FlipBackward0, OF(FlipBackward0, dims)>(),
      reads<gen::RollBackward0, OF(RollBackward0, dims), OF(RollBackward0, shifts)>(),
      reads<gen::UnfoldBackward0, OF(UnfoldBackward0, dimension)>(),
      reads<gen::ConstantPadNdBackward0, OF(ConstantPadNdBackward0, pad)>(),
      reads<gen::DiagonalBackward0, OF(DiagonalBackward0, dim1), OF(DiagonalBackward0, dim2),
            OF(DiagonalBackward0, offset)>(),
      reads<gen::NativeLayerNormBackward0, OF(NativeLayerNormBackward0, normalized_shape)>(),
      reads<gen::FusedRmsNormBackward0, OF(FusedRmsNormBackward0, normalized_shape)>(),
      reads<gen::NativeBatchNormBackward0, OF(NativeBatchNormBackward0, training)>(),
      reads<gen::CudnnBatchNormBackward0, OF(CudnnBatchNormBackward0, training)>(),
      reads<gen::IndexBackward0, OF(IndexBackward0, indices_)>(),
      reads<gen::IndexPutBackward0, OF(IndexPutBackward0, indices_)>(),
      reads<gen::EmbeddingBackward0, OF(EmbeddingBackward0, padding_idx),
            OF(EmbeddingBackward0, scale_grad_by_freq), OF(EmbeddingBackward0, sparse)>(),
      reads<gen::AddmmBackward0, OF(AddmmBackward0, alpha), OF(AddmmBackward0, beta)>(),
      reads<gen::AddBackward0, OF(AddBackward0, alpha)>(),
  };
  return every;
}

// What Python knows of a node; as in executor.py.
enum class NodeKind { without_settings, with_settings, unknown, marked };

// By virtual table: asking for a type's name is slow. Only touched by whoever holds the GIL.
inline ska::flat_hash_map<const void*, Read>& kinds() {
  static ska::flat_hash_map<const void*, Read> every;
  return every;
}
inline const void* kind_of(const ag::Node* node) { return *reinterpret_cast<void* const*>(node); }

inline void read_leaf(const ag::Node* node, Content& to) {
  auto& leaf = static_cast<const ag::AccumulateGrad*>(node)->variable;
  to.put(leaf.unsafeGetTensorImpl());
  // A parameter that was swapped for another has the memory of that one, and its address.
  to.put(py::cast(leaf).ptr());
  to.put(int64_t(leaf.requires_grad()) + 2 * leaf.is_contiguous() +
         4 * int64_t(leaf.scalar_type()));
  to.is_known &=
      leaf.layout() == at::kStrided && !leaf.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  if (to.is_known)
    for (auto size : leaf.sizes()) to.put(size);
}

// What was done to the slice that a node has written; nothing if somebody's function has.
inline const ag::Node* written_by(const ag::CopySlices& slices) {
  auto* fn = slices.fn.get();  // none: it was used up
  if (!fn || slices.view_fn) return nullptr;
  auto is_generated = std::strncmp(typeid(*fn).name(), "N5torch8autograd9generated", 26) == 0;
  return is_generated || typeid(*fn) == typeid(ag::CopyBackwards) ? fn : nullptr;
}

inline void read_slices(const ag::Node* node, Content& to) {
  auto& slices = *static_cast<const ag::CopySlices*>(node);
  auto* fn = written_by(slices);
  to.is_known &= fn != nullptr;
  if (fn) to.put(kind_of(fn)), to.put(slices.base), to.put(slices.view);
}

// `Memory` of slices.py, of a node that writes a slice or reads one of what was written: where the
// whole and the slice lie, and which operation wrote it.
inline std::optional<py::tuple> memory_of(const py::handle& given) {
  if (!ag::THPCppFunction_Check(given.ptr())) return {};
  auto* node = reinterpret_cast<ag::THPCppFunction*>(given.ptr())->cdata.get();
  bool is_known = true;
  auto numbers = [&](c10::SymIntArrayRef every) {
    auto plain = c10::asIntArrayRefSlowOpt(every);
    is_known &= plain.has_value();
    return py::tuple(py::cast(plain.value_or(c10::IntArrayRef()).vec()));
  };
  auto places = [&](const at::TensorGeometry& whole, c10::SymIntArrayRef sizes,
                    c10::SymIntArrayRef strides, const c10::SymInt& offset,
                    const std::string& name) {
    auto from = offset - whole.sym_storage_offset();
    is_known &= !from.is_symbolic();
    auto slice =
        py::make_tuple(numbers(sizes), numbers(strides), is_known ? from.as_int_unchecked() : 0);
    return py::make_tuple(
        py::make_tuple(numbers(whole.sym_sizes()), numbers(whole.sym_strides()), 0), slice, name);
  };
  py::tuple found;
  if (auto* slices = dynamic_cast<const ag::CopySlices*>(node)) {
    auto* fn = written_by(*slices);
    if (!fn) return {};
    auto& view = slices->view;
    found = places(slices->base, view.sym_sizes(), view.sym_strides(), view.sym_storage_offset(),
                   fn->name());
  } else if (auto* read = dynamic_cast<const gen::AsStridedBackward0*>(node)) {
    auto& whole = read->self_geometry;
    found = places(whole, read->size, read->stride,
                   read->storage_offset.value_or(whole.sym_storage_offset()), "");
  } else
    return {};
  return is_known ? std::optional(found) : std::nullopt;
}

// Whose it is, its sizes, and what its outputs are; a function in Python that is not marked may be
// anything.
inline void read_marked(const ag::Node* node, Content& to) {
  auto* mark = mark_of(node);
  if (!mark) {
    to.is_known = false;
    return;
  }
  auto [made_by, sizes, places] =
      py::handle(mark)
          .cast<std::tuple<py::object, std::vector<int64_t>, std::map<int64_t, int64_t>>>();
  to.put(made_by.ptr());
  to.put(sizes);
  for (auto& [output, place] : places) to.put(output), to.put(place);
}

inline bool is_one(const at::Scalar& factor) {
  return !factor.isComplex() && factor.toDouble() == 1.;
}

inline bool is_hooked(ag::Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() ||
         !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

// The nodes behind some losses, in the order of `_walk` of graph.py.
struct Walk {
  Tensor root;
  using Pointer = std::decay_t<decltype(root.grad_fn())>;
  Pointer first;  // keeps them, even if somebody detaches the root meanwhile
  std::vector<ag::Node*> nodes;
  std::shared_ptr<Content> content;
  uint64_t oldest = std::numeric_limits<uint64_t>::max();
  bool has_hooks = false, is_on_host = true;

  explicit Walk(Tensor losses) : root(std::move(losses)), first(root.grad_fn()) {
    TORCH_CHECK_VALUE(first, "losses: have no graph");
    thread_local size_t usual = 64;  // how many there were
    ska::flat_hash_map<const ag::Node*, int64_t> index;
    index.reserve(usual);
    nodes.reserve(usual);
    nodes.push_back(first.get());
    index.emplace(nodes[0], 0);
    for (size_t n = 0; n < nodes.size(); n++) {  // grows on the way
      oldest = std::min(oldest, nodes[n]->sequence_nr());
      for (auto& edge : nodes[n]->next_edges())
        if (edge.function && index.emplace(edge.function.get(), nodes.size()).second)
          nodes.push_back(edge.function.get());
    }
    usual = nodes.size();
    read(index);
  }

  void read(const ska::flat_hash_map<const ag::Node*, int64_t>& index) {
    content = std::make_shared<Content>();
    content->numbers.reserve(20 * nodes.size());
    auto& known = kinds();
    for (auto* node : nodes) {
      auto kind = known.find(kind_of(node));
      if (kind == known.end()) {
        content->is_known = false;
        return;
      }
      content->put(kind->first);
      if (kind->second) kind->second(node, *content);
      for (auto& edge : node->next_edges()) {
        content->put(edge.function ? index.at(edge.function.get()) : -1);
        content->put(edge.input_nr);
      }
      if (kind->second == &read_leaf) continue;
      has_hooks |= is_hooked(*node);
      for (uint32_t output = 0; output < node->num_inputs(); output++)
        read_output(node->input_metadata(output));
      if (!content->is_known) return;
    }
    content->put(root.output_nr());
    content->close();
  }

  void read_output(const ag::InputMetadata& one) {
    if (one.was_default_constructed()) return content->put(-1);
    content->is_known &=
        !one.is_nested_tensor() && !one.is_tensor_subclass() && one.layout() == at::kStrided;
    is_on_host &= one.device().is_cpu();
    if (!content->is_known) return;
    auto shape = one.shape_as_dim_vector();
    content->put(int64_t(shape.size()) + 64 * int64_t(one.options().dtype().toScalarType()) +
                 (int64_t(one.device().type()) << 32) + (int64_t(one.device().index()) << 48));
    for (auto& size : shape) content->put(size);
  }

  // Learns what kinds of nodes there are; whether all are known then.
  bool learn(const std::vector<int64_t>& by_node) {
    TORCH_CHECK_VALUE(by_node.size() == nodes.size(), "by_node: must be of every node");
    for (size_t n = 0; n < nodes.size(); n++) {
      auto* node = nodes[n];
      auto kind = NodeKind(by_node[n]);
      if (dynamic_cast<ag::AccumulateGrad*>(node))
        kinds()[kind_of(node)] = &read_leaf;
      else if (dynamic_cast<ProductTap*>(node))
        kinds()[kind_of(node)] = nullptr;
      else if (dynamic_cast<ag::CopySlices*>(node))
        kinds()[kind_of(node)] = &read_slices;
      else if (dynamic_cast<LookupTap*>(node) || kind == NodeKind::marked)
        kinds()[kind_of(node)] = &read_marked;  // functions in Python are all of one kind
      else if (kind != NodeKind::unknown) {
        auto found = settings().find(typeid(*node));
        if (found != settings().end())
          kinds()[kind_of(node)] = found->second;
        else if (kind == NodeKind::without_settings)
          kinds()[kind_of(node)] = nullptr;
      }
    }
    *this = Walk(root);
    return content->is_known;
  }

  std::vector<int64_t> shape(int64_t node) const {
    std::vector<int64_t> sizes;
    for (auto& size : nodes.at(node)->input_metadata(0).shape_as_dim_vector())
      sizes.push_back(size.as_int_unchecked());
    return sizes;
  }
};

}  // namespace gradvac
