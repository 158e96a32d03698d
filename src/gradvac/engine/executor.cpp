// Reads autograd graphs, and executes plans of small steps on a CPU without Python in between; see executor.py.
//
// Beside ATen it knows the nodes of torch by their fields (generated/Functions.h). That is no public interface, so a node
// that is not of the expected kind is never read: whoever asks is told so, and Python's own way is taken, the reference.
//
// K components, T tasks, B rows, N entries, D width, P entries of a parameter, V rows of a table, U of them that are used

#include <torch/csrc/Exceptions.h>

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <queue>
#include <typeindex>
#include <unordered_map>

#include "../utils/native.h"

namespace gradvac {

namespace ag = torch::autograd;
namespace gen = torch::autograd::generated;
namespace py = pybind11;

namespace {

// -- what distinguishes graphs ------------------------------------------------------------------------

// Operations, how they are connected, their settings, parameters, and all sizes, as numbers.
struct Content {
  std::vector<int64_t> numbers;
  size_t print = 0;
  bool is_known = true;  // of every node it is known what distinguishes it

  void put(int64_t number) { numbers.push_back(number); }
  void put(const void* address) { put(reinterpret_cast<int64_t>(address)); }
  void put(const c10::SymInt& number) { number.is_symbolic() ? is_known = false : (put(number.as_int_unchecked()), true); }
  void put(const at::Scalar& number) {
    auto value = number.isComplex() ? 0. : number.toDouble();
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    put(bits);
    is_known &= !number.isComplex() && !number.isSymbolic();
  }
  void put(const ag::SavedVariable& saved) { put(int64_t(saved.has_hooks() || (saved.get_raw_data() && saved.get_raw_data()->defined()))); }
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
  void put(const c10::OptionalArray<T>& every) { put(every.list); }
  void put(const at::TensorGeometry& one) {
    put(one.sym_sizes().vec());
    put(one.sym_strides().vec());
    put(one.sym_storage_offset());
  }

  void close() {
    print = numbers.size();
    for (auto number : numbers) print = (print ^ size_t(number)) * 0x9e3779b97f4a7c15ull, print ^= print >> 29;
  }
  bool operator==(const Content& other) const { return numbers == other.numbers; }
};

using Read = void (*)(const ag::Node*, Content&);

template <class Node, auto... fields>
std::pair<std::type_index, Read> reads() {
  return {typeid(Node), [](const ag::Node* node, Content& to) { (to.put(static_cast<const Node*>(node)->*fields), ...); }};
}
#define OF(Node, field) &gen::Node::field
#define DIM(Node) reads<gen::Node, OF(Node, dim)>()
#define DIM_KEPT(Node) reads<gen::Node, OF(Node, dim), OF(Node, keepdim)>()

// The settings of graph.py of nodes that have any, and factors that this file takes for 1.
const std::unordered_map<std::type_index, Read>& settings() {
  static const std::unordered_map<std::type_index, Read> every = {
      DIM(CatBackward0), DIM(StackBackward0), DIM(UnbindBackward0), DIM(SplitBackward0), DIM(SplitWithSizesBackward0), DIM(UnsafeSplitBackward0),
      DIM(SliceBackward0), DIM(UnsqueezeBackward0), DIM(UnsqueezeBackward1), DIM(SqueezeBackward1), DIM(SqueezeBackward2), DIM(SqueezeBackward4),
      DIM(SqueezeBackward5), DIM(SoftmaxBackward0), DIM(LogSoftmaxBackward0), DIM(SafeSoftmaxBackward0), DIM(GluBackward0), DIM(CumsumBackward0),
      DIM(CumprodBackward0), DIM(LogcumsumexpBackward0), DIM(GatherBackward0), DIM(ScatterBackward0), DIM(ScatterAddBackward0), DIM(IndexSelectBackward0),
      DIM(IndexAddBackward0), DIM(IndexCopyBackward0), DIM(SortBackward0), DIM(TopkBackward0), DIM(SliceScatterBackward0), DIM(FftR2CBackward0),
      DIM(FftC2RBackward0), DIM(FftC2CBackward0), DIM_KEPT(SumBackward1), DIM_KEPT(MeanBackward1), DIM_KEPT(VarBackward0), DIM_KEPT(StdBackward0),
      DIM_KEPT(VarMeanBackward0), DIM_KEPT(StdMeanBackward0), DIM_KEPT(LinalgVectorNormBackward0), DIM_KEPT(NormBackward1), DIM_KEPT(LogsumexpBackward0),
      DIM_KEPT(AmaxBackward0), DIM_KEPT(AminBackward0), DIM_KEPT(MaxBackward0), DIM_KEPT(MinBackward0), DIM_KEPT(ProdBackward1),
      reads<gen::AsStridedBackward0, OF(AsStridedBackward0, self_geometry), OF(AsStridedBackward0, size), OF(AsStridedBackward0, stride), OF(AsStridedBackward0, storage_offset)>(),
      reads<gen::PermuteBackward0, OF(PermuteBackward0, dims)>(),
      reads<gen::TransposeBackward0, OF(TransposeBackward0, dim0), OF(TransposeBackward0, dim1)>(),
      reads<gen::SelectBackward0, OF(SelectBackward0, dim), OF(SelectBackward0, index)>(),
      reads<gen::SelectScatterBackward0, OF(SelectScatterBackward0, dim), OF(SelectScatterBackward0, index)>(),
      reads<gen::FlipBackward0, OF(FlipBackward0, dims)>(),
      reads<gen::RollBackward0, OF(RollBackward0, dims), OF(RollBackward0, shifts)>(),
      reads<gen::UnfoldBackward0, OF(UnfoldBackward0, dimension)>(),
      reads<gen::ConstantPadNdBackward0, OF(ConstantPadNdBackward0, pad)>(),
      reads<gen::DiagonalBackward0, OF(DiagonalBackward0, dim1), OF(DiagonalBackward0, dim2), OF(DiagonalBackward0, offset)>(),
      reads<gen::NativeLayerNormBackward0, OF(NativeLayerNormBackward0, normalized_shape)>(),
      reads<gen::FusedRmsNormBackward0, OF(FusedRmsNormBackward0, normalized_shape)>(),
      reads<gen::NativeBatchNormBackward0, OF(NativeBatchNormBackward0, training)>(),
      reads<gen::CudnnBatchNormBackward0, OF(CudnnBatchNormBackward0, training)>(),
      reads<gen::IndexBackward0, OF(IndexBackward0, indices_)>(),
      reads<gen::IndexPutBackward0, OF(IndexPutBackward0, indices_)>(),
      reads<gen::EmbeddingBackward0, OF(EmbeddingBackward0, padding_idx), OF(EmbeddingBackward0, scale_grad_by_freq), OF(EmbeddingBackward0, sparse)>(),
      reads<gen::AddmmBackward0, OF(AddmmBackward0, alpha), OF(AddmmBackward0, beta)>(),
      reads<gen::AddBackward0, OF(AddBackward0, alpha)>(),
  };
  return every;
}

enum class Told { nothing, settings, never, marked };  // by Python, of a node: has it settings, may it be anything, or is it marked

// By virtual table: asking for a type's name is slow. Only touched by whoever holds the GIL.
ska::flat_hash_map<const void*, Read>& kinds() {
  static ska::flat_hash_map<const void*, Read> every;
  return every;
}
const void* kind_of(const ag::Node* node) { return *reinterpret_cast<void* const*>(node); }

void read_leaf(const ag::Node* node, Content& to) {
  auto& leaf = static_cast<const ag::AccumulateGrad*>(node)->variable;
  to.put(leaf.unsafeGetTensorImpl());
  to.put(py::cast(leaf).ptr());  // a parameter that was swapped for another has the memory of that one, and its address
  to.put(int64_t(leaf.requires_grad()) + 2 * leaf.is_contiguous() + 4 * int64_t(leaf.scalar_type()));
  to.is_known &= leaf.layout() == at::kStrided && !leaf.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  if (to.is_known) for (auto size : leaf.sizes()) to.put(size);
}

// What was done to the slice that a node has written; nothing if somebody's function has.
const ag::Node* written_by(const ag::CopySlices& slices) {
  auto* fn = slices.fn.get();  // none: it was used up
  if (!fn || slices.view_fn) return nullptr;
  auto is_generated = std::strncmp(typeid(*fn).name(), "N5torch8autograd9generated", 26) == 0;
  return is_generated || typeid(*fn) == typeid(ag::CopyBackwards) ? fn : nullptr;
}

void read_slices(const ag::Node* node, Content& to) {
  auto& slices = *static_cast<const ag::CopySlices*>(node);
  auto* fn = written_by(slices);
  to.is_known &= fn != nullptr;
  if (fn) to.put(kind_of(fn)), to.put(slices.base), to.put(slices.view);
}

// `Memory` of slices.py, of a node that writes a slice or reads one of what was written: where the whole and the slice
// lie, and which operation wrote it.
std::optional<py::tuple> memory_of(const py::handle& given) {
  if (!ag::THPCppFunction_Check(given.ptr())) return {};
  auto* node = reinterpret_cast<ag::THPCppFunction*>(given.ptr())->cdata.get();
  bool is_known = true;
  auto numbers = [&](c10::SymIntArrayRef every) {
    auto plain = c10::asIntArrayRefSlowOpt(every);
    is_known &= plain.has_value();
    return py::tuple(py::cast(plain.value_or(c10::IntArrayRef()).vec()));
  };
  auto places = [&](const at::TensorGeometry& whole, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, const c10::SymInt& offset, const std::string& name) {
    auto from = offset - whole.sym_storage_offset();
    is_known &= !from.is_symbolic();
    auto slice = py::make_tuple(numbers(sizes), numbers(strides), is_known ? from.as_int_unchecked() : 0);
    return py::make_tuple(py::make_tuple(numbers(whole.sym_sizes()), numbers(whole.sym_strides()), 0), slice, name);
  };
  py::tuple found;
  if (auto* slices = dynamic_cast<const ag::CopySlices*>(node)) {
    auto* fn = written_by(*slices);
    if (!fn) return {};
    auto& view = slices->view;
    found = places(slices->base, view.sym_sizes(), view.sym_strides(), view.sym_storage_offset(), fn->name());
  } else if (auto* read = dynamic_cast<const gen::AsStridedBackward0*>(node)) {
    auto& whole = read->self_geometry;
    found = places(whole, read->size, read->stride, read->storage_offset.value_or(whole.sym_storage_offset()), "");
  } else return {};
  return is_known ? std::optional(found) : std::nullopt;
}

// What is noted at nodes of compiled regions of ours (`RUN` of graph.py).
constexpr auto MARK = "gradvac";
PyObject* notes_of(const ag::Node* node) { return static_cast<ag::PyAnomalyMetadata*>(const_cast<ag::Node*>(node)->metadata())->dict(); }
PyObject* mark_of(const ag::Node* node) { return PyDict_GetItemString(notes_of(node), MARK); }

// Whose it is, its sizes, and what its outputs are; a function in Python that is not marked may be anything.
void read_marked(const ag::Node* node, Content& to) {
  auto* mark = mark_of(node);
  if (!mark) {
    to.is_known = false;
    return;
  }
  auto [made_by, sizes, places] = py::handle(mark).cast<std::tuple<py::object, std::vector<int64_t>, std::map<int64_t, int64_t>>>();
  to.put(made_by.ptr());
  to.put(sizes);
  for (auto& [output, place] : places) to.put(output), to.put(place);
}

// -- parameters of compiled regions (compiled.py) -----------------------------------------------------

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
      gradients[1] = at::embedding_dense_backward(given[0], given[1].to(at::kLong), num_rows, padding, false);
    return gradients;
  }
};

template <class Tap, class... Values>
auto make_tap(Values... values) {  // nodes are counted in one of two ways, by the version of torch
  if constexpr (std::is_same_v<decltype(std::declval<Tap&>().getptr()), std::shared_ptr<ag::Node>>) return std::make_shared<Tap>(values...);
  else return c10::make_intrusive<Tap>(values...);
}

// An output of a tap: zeros without memory.
template <class Pointer>
Tensor placeholder(const Pointer& node, const py::handle& shape, at::ScalarType dtype, at::Device device) {
  static auto& zeros = *new std::map<std::tuple<at::ScalarType, at::DeviceType, at::DeviceIndex>, Tensor>;  // for ever: nothing is freed after Python's end
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
Tensors region_inputs(const Tensor& anchor, const py::tuple& requests) {
  Tensors given;
  for (auto request : requests) {
    auto parts = py::reinterpret_borrow<py::tuple>(request);
    auto parameter = parts[0].cast<Tensor>();
    switch (parts.size()) {
      case 1: given.push_back(parameter.detach()); break;
      case 2: {
        given.push_back(parameter.expand(parts[1].cast<std::vector<int64_t>>()));
        if (auto* node = given.back().grad_fn().get()) PyDict_SetItemString(notes_of(node), MARK, Py_None);
        break;
      }
      case 4: {
        auto padding = parts[1].cast<int64_t>();
        auto node = make_tap<LookupTap>(padding, parameter.size(0));
        node->set_next_edges(ag::collect_next_edges(anchor, parameter));
        PyDict_SetItemString(notes_of(node.get()), MARK, py::make_tuple(py::none(), py::make_tuple(padding, parameter.size(0)), py::dict()).ptr());
        given.push_back(placeholder(node, parts[2], parameter.scalar_type(), parameter.device()));
        given.push_back(placeholder(node, parts[3], at::kDouble, parameter.device()));
        break;
      }
      default: {
        auto node = make_tap<ProductTap>();
        auto dtype = parts[4].cast<at::ScalarType>();
        auto edges = parts[1].is_none() ? ag::collect_next_edges(anchor, parameter) : ag::collect_next_edges(anchor, parameter, parts[1].cast<Tensor>());
        node->set_next_edges(std::move(edges));
        for (auto shape : {parts[2], parts[3]}) given.push_back(placeholder(node, shape, dtype, parameter.device()));
      }
    }
  }
  return given;
}

// The nodes behind some losses, in the order of `_walk` of graph.py.
struct Walk {
  Tensor root;
  std::decay_t<decltype(root.grad_fn())> first;  // keeps them, even if somebody detaches the root meanwhile
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
        if (edge.function && index.emplace(edge.function.get(), nodes.size()).second) nodes.push_back(edge.function.get());
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
      has_hooks |= !node->pre_hooks().empty() || !node->post_hooks().empty() || !node->tensor_pre_hooks().empty() || !node->retains_grad_hooks().empty();
      for (uint32_t output = 0; output < node->num_inputs(); output++) read_output(node->input_metadata(output));
      if (!content->is_known) return;
    }
    content->put(root.output_nr());
    content->close();
  }

  void read_output(const ag::InputMetadata& one) {
    if (one.was_default_constructed()) return content->put(-1);
    content->is_known &= !one.is_nested_tensor() && !one.is_tensor_subclass() && one.layout() == at::kStrided;
    is_on_host &= one.device().is_cpu();
    if (!content->is_known) return;
    auto shape = one.shape_as_dim_vector();
    content->put(int64_t(shape.size()) + 64 * int64_t(one.options().dtype().toScalarType()) + (int64_t(one.device().type()) << 32) + (int64_t(one.device().index()) << 48));
    for (auto& size : shape) content->put(size);
  }

  // Learns what kinds of nodes there are; whether all are known then.
  bool learn(const std::vector<int64_t>& told) {
    TORCH_CHECK_VALUE(told.size() == nodes.size(), "told: must be of every node");
    for (size_t n = 0; n < nodes.size(); n++) {
      auto* node = nodes[n];
      if (dynamic_cast<ag::AccumulateGrad*>(node)) kinds()[kind_of(node)] = &read_leaf;
      else if (dynamic_cast<ProductTap*>(node)) kinds()[kind_of(node)] = nullptr;
      else if (dynamic_cast<ag::CopySlices*>(node)) kinds()[kind_of(node)] = &read_slices;
      else if (dynamic_cast<LookupTap*>(node) || Told(told[n]) == Told::marked) kinds()[kind_of(node)] = &read_marked;  // functions in Python are all of one kind
      else if (Told(told[n]) != Told::never) {
        auto found = settings().find(typeid(*node));
        if (found != settings().end()) kinds()[kind_of(node)] = found->second;
        else if (Told(told[n]) == Told::nothing) kinds()[kind_of(node)] = nullptr;
      }
    }
    *this = Walk(root);
    return content->is_known;
  }

  std::vector<int64_t> shape(int64_t node) const {
    std::vector<int64_t> sizes;
    for (auto& size : nodes.at(node)->input_metadata(0).shape_as_dim_vector()) sizes.push_back(size.as_int_unchecked());
    return sizes;
  }
};

// -- a plan -------------------------------------------------------------------------------------------

enum class Kind { product, norm, scale, sum, lookup, table };  // table: of a lookup that all rows share, added to what they have

struct Junction {
  Kind kind;
  int64_t node, weight, shift;  // places in the walk, and of parameters; -1: none
  bool is_transposed;
  int64_t edge, below;  // a scale's; the lookup of a table
  int64_t rows;         // whose index
};
using GivenJunction = std::tuple<int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t, int64_t>;

// In which order a pass to some nodes (`ends`) runs those above them, and where gradients go meanwhile.
struct Schedule {
  struct One { int64_t place, slot, num; std::vector<int64_t> to; };  // slots of its gradients, and of those it returns (-1: none)
  std::shared_ptr<Content> of;  // graphs
  std::vector<One> order;
  std::vector<int64_t> places, ends;  // of these, and their slots
  std::vector<bool> is_kept;  // slots of ends
  int64_t first;              // slot

  bool fits(const Walk& walk) const { return of && of->is_known && walk.content->is_known && *of == *walk.content; }

  void make(const Walk& walk, std::vector<int64_t> of_ends) {
    places = std::move(of_ends);
    auto& nodes = walk.nodes;
    std::unordered_map<const ag::Node*, int64_t> index;
    std::vector<int64_t> slots(nodes.size() + 1), num_left(nodes.size());
    for (size_t n = 0; n < nodes.size(); n++) index[nodes[n]] = int64_t(n), slots[n + 1] = slots[n] + nodes[n]->num_inputs();
    auto place_of = [&](const ag::Edge& edge) { return edge.function ? index.at(edge.function.get()) : -1; };
    for (auto* node : nodes) for (auto& edge : node->next_edges()) if (edge.function) num_left[place_of(edge)]++;
    std::vector<int64_t> every;
    std::priority_queue<std::pair<uint64_t, int64_t>> ready;  // the youngest first, as torch's engine
    for (ready.emplace(0, 0); !ready.empty();) {
      auto place = ready.top().second;
      ready.pop();
      every.push_back(place);
      for (auto& edge : nodes[place]->next_edges()) if (edge.function && !--num_left[place_of(edge)]) ready.emplace(edge.function->sequence_nr(), place_of(edge));
    }
    std::vector<bool> is_on_way(nodes.size());
    order.clear(), ends.clear();
    is_kept.assign(slots.back(), false);
    for (auto place : places) is_on_way[place] = is_kept[slots[place]] = true, ends.push_back(slots[place]);
    for (auto place = every.rbegin(); place != every.rend(); place++) {
      One one{*place, slots[*place], nodes[*place]->num_inputs(), {}};
      bool runs = false;
      for (auto& edge : nodes[*place]->next_edges()) {
        bool is_wanted = edge.function && is_on_way[place_of(edge)];
        one.to.push_back(is_wanted ? slots[place_of(edge)] + edge.input_nr : -1);
        runs |= is_wanted;
      }
      if (!runs) continue;
      is_on_way[*place] = true;
      order.push_back(std::move(one));
    }
    std::reverse(order.begin(), order.end());
    first = walk.root.output_nr();
    of = walk.content;
  }
};

struct Plan {
  std::vector<Junction> junctions;
  std::vector<const void*> parameters;  // which; whoever has them may still swap them for others
  std::vector<int64_t> components;      // theirs; -1: what Python made of parameters
  int64_t num_components;
  std::vector<int64_t> others;  // places of junctions that Python builds
  at::ScalarType dtype;
  Schedule schedule;

  Plan(const std::vector<GivenJunction>& given, const Tensors& every, std::vector<int64_t> components_, int64_t num_components_, std::vector<int64_t> others_)
      : components(std::move(components_)), num_components(num_components_), others(std::move(others_)), dtype(every.at(0).scalar_type()) {
    for (auto& one : every) parameters.push_back(one.unsafeGetTensorImpl());
    for (auto& [kind, node, weight, shift, is_transposed, edge, below, rows] : given) junctions.push_back({Kind(kind), node, weight, shift, is_transposed, edge, below, rows});
  }

  // Frees what nodes saved at which the pass ended, which did not run.
  void release(const Walk& walk) const {
    for (auto place : schedule.places) walk.nodes[place]->release_variables();
  }

  bool is_whole() const { return others.empty() && !std::count(components.begin(), components.end(), -1); }  // Python builds nothing
};

template <class Node>
Node* as(const Walk& walk, int64_t place) { return place >= 0 && place < int64_t(walk.nodes.size()) ? dynamic_cast<Node*>(walk.nodes[place]) : nullptr; }

bool is_one(const at::Scalar& factor) { return !factor.isComplex() && factor.toDouble() == 1.; }

// What a junction needs beside its output gradient.
struct Operands {
  std::optional<Tensor> x, mean, scale;
  std::vector<int64_t> tokens;  // -1: of padding
  std::vector<int64_t> shape;   // of the output
};

struct Captured {
  const Plan& plan;
  const Tensors& parameters;
  const Walk& walk;
  const std::vector<Rows>& rows;

  bool read(const ag::SavedVariable& saved, ag::Node* node, std::optional<Tensor>& to) const {
    if (saved.has_hooks()) return false;  // a checkpoint, or on the host: not before the pass
    to = saved.unpack(node->getptr());
    return is_plain(*to, plan.dtype);
  }

  bool read_tokens(gen::EmbeddingBackward0* node, int64_t table, std::vector<int64_t>& to) const {
    if (!node || node->scale_grad_by_freq || node->sparse || node->indices_.has_hooks() || node->padding_idx.is_symbolic()) return false;
    auto tokens = node->indices_.unpack(node->getptr());
    if (!is_plain(tokens, tokens.scalar_type()) || (tokens.scalar_type() != at::kLong && tokens.scalar_type() != at::kInt)) return false;
    tokens = tokens.to(at::kLong).contiguous();
    auto* first = tokens.const_data_ptr<int64_t>();
    auto V = parameters[table].size(0), padding = node->padding_idx.as_int_unchecked();
    to.assign(first, first + tokens.numel());
    for (auto& token : to) {
      if (token < 0 || token >= V) return false;
      if (token == padding) token = -1;
    }
    return V <= MOST_ROWS;
  }

  // What a node saved; false if this is not what was planned.
  bool operator()(const Junction& one, Operands& to) const {
    if (one.node < 0 || one.node >= int64_t(walk.nodes.size()) || !walk.nodes[one.node]->num_inputs()) return false;
    to.shape = walk.shape(one.node);
    int64_t numel = c10::multiply_integers(to.shape), B = rows[one.rows].num;
    auto& weight = parameters[one.weight];
    if (to.shape.empty() || !numel) return false;
    auto D = to.shape.back(), N = numel / D;
    if (N % B) return false;
    auto is_like = [&](const std::optional<Tensor>& value, int64_t size) { return !value || value->numel() == size; };
    auto is_vector = [&](int64_t number) { return number < 0 || parameters[number].numel() == D; };
    switch (one.kind) {
      case Kind::product: {
        bool is_read = false;
        if (auto* addmm = as<gen::AddmmBackward0>(walk, one.node)) is_read = is_one(addmm->alpha) && is_one(addmm->beta) && read(addmm->mat1_, addmm, to.x);
        else if (auto* mm = as<gen::MmBackward0>(walk, one.node)) is_read = read(mm->self_, mm, to.x);
        return is_read && to.x->dim() == 2 && to.x->size(0) == N && weight.numel() == D * to.x->size(1) && is_vector(one.shift);
      }
      case Kind::norm: {
        bool is_read = false;
        if (auto* norm = as<gen::NativeLayerNormBackward0>(walk, one.node)) is_read = read(norm->input_, norm, to.x) && read(norm->result1_, norm, to.mean) && read(norm->result2_, norm, to.scale);
        else if (auto* rms = as<gen::FusedRmsNormBackward0>(walk, one.node)) is_read = read(rms->input_, rms, to.x) && read(rms->result1_, rms, to.scale);
        return is_read && is_like(to.x, numel) && is_like(to.mean, N) && is_like(to.scale, N) && is_vector(one.weight) && is_vector(one.shift);
      }
      case Kind::scale: {
        auto* mul = as<gen::MulBackward0>(walk, one.node);
        return mul && read(one.edge == 0 ? mul->other_ : mul->self_, mul, to.x) && to.x->sizes() == to.shape && is_vector(one.weight);
      }
      case Kind::sum: {  // over all entries, or over rows alone
        auto* add = as<gen::AddBackward0>(walk, one.node);
        bool is_known = add ? one.edge == 0 || is_one(add->alpha) : as<gen::ExpandBackward0>(walk, one.node) != nullptr;
        return is_known && (is_vector(one.weight) || weight.numel() * B == numel);
      }
      case Kind::lookup: return read_tokens(as<gen::EmbeddingBackward0>(walk, one.node), one.weight, to.tokens) && int64_t(to.tokens.size()) == N && weight.numel() == weight.size(0) * D;
      case Kind::table: {
        auto* add = as<gen::AddBackward0>(walk, one.node);
        if (!add || (one.edge && !is_one(add->alpha)) || !read_tokens(as<gen::EmbeddingBackward0>(walk, one.below), one.weight, to.tokens)) return false;
        return int64_t(to.tokens.size()) * B == N && weight.numel() == weight.size(0) * D;
      }
    }
    return false;
  }
};

// -- a step -------------------------------------------------------------------------------------------

struct Block {
  Tensor gradients;             // [T, P], of all entries or of those of some rows
  bool is_of_rows = false;
  std::vector<int64_t> tokens;  // these rows, of a table that is only looked up
};

struct Step {
  std::shared_ptr<Plan> plan;
  Tensors parameters;
  int64_t T;
  std::vector<Block> blocks;                   // by parameter; undefined where no gradient came
  std::vector<std::optional<Tensor>> others;  // output gradients of junctions that Python builds
  Tensor taken;                                // Gram matrices

  struct Found { const Rows* rows; Tensor values; std::vector<int64_t> tokens; };

  Step(std::shared_ptr<Plan> given, const Tensors& every, const std::vector<Rows>& rows, std::vector<Operands>& operands, std::vector<Tensor>& gradients, int64_t T)
      : plan(std::move(given)), parameters(every), T(T), blocks(every.size()) {
    at::AutoDispatchBelowADInplaceOrView plain;  // nothing here is differentiated
    for (auto n = operands.size(); n < gradients.size(); n++) others.push_back(gradients[n].defined() ? std::optional<Tensor>(gradients[n]) : std::nullopt);
    auto options = at::TensorOptions(plan->dtype);
    Rows by_task(at::arange(T), T);
    std::vector<std::vector<Found>> lookups(blocks.size());
    for (size_t n = 0; n < operands.size(); n++) {
      auto& one = plan->junctions[n];
      auto& given_to = operands[n];
      auto g = std::move(gradients[n]);
      if (!g.defined()) continue;
      if (!is_plain(g, plan->dtype)) g = at::empty(g.sizes(), options).copy_(g);
      auto& own = rows[one.rows];
      auto P = parameters[one.weight].numel();
      auto sums_of = [&](int64_t parameter, const Tensor& values) {
        auto& block = blocks[parameter].gradients;
        if (!block.defined()) block = at::zeros({T, parameters[parameter].numel()}, options);
        add_sums(own, block, values, given_to.x, given_to.mean, given_to.scale);
      };
      switch (one.kind) {
        case Kind::product: {
          auto& block = blocks[one.weight].gradients;
          bool is_first = !block.defined();
          if (is_first) block = at::empty({T, P}, options);
          auto I = given_to.x->size(1), O = P / I;
          add_products(own, *given_to.x, g, one.is_transposed, block.view({T, one.is_transposed ? O : I, one.is_transposed ? I : O}), is_first);
          given_to.x.reset();
          break;
        }
        case Kind::lookup: lookups[one.weight].push_back({&own, std::move(g), std::move(given_to.tokens)}); break;
        case Kind::table: {
          auto sums = at::zeros({T, g.numel() / own.num}, options);
          add_sums(own, sums, g);
          std::vector<int64_t> tokens;
          for (int64_t t = 0; t < T; t++) tokens.insert(tokens.end(), given_to.tokens.begin(), given_to.tokens.end());
          lookups[one.weight].push_back({&by_task, sums, std::move(tokens)});
          break;
        }
        default: sums_of(one.weight, g);
      }
      given_to.x.reset(), given_to.mean.reset(), given_to.scale.reset();
      if (one.shift >= 0) sums_of(one.shift, g);
    }
    for (size_t p = 0; p < blocks.size(); p++)
      if (!lookups[p].empty()) look_up(blocks[p], lookups[p], parameters[p], T);
  }

  // Task gradients of what Python made of parameters, [T, P] each.
  std::vector<std::optional<Tensor>> made() const {
    std::vector<std::optional<Tensor>> every;
    for (size_t p = 0; p < blocks.size(); p++)
      if (plan->components[p] < 0) every.push_back(blocks[p].gradients.defined() ? std::optional<Tensor>(blocks[p].gradients) : std::nullopt);
    return every;
  }

  // Adds task gradients [T, P] that Python has built.
  void add(int64_t p, const Tensor& built) {
    at::AutoDispatchBelowADInplaceOrView plain;
    auto& block = blocks.at(p);
    TORCH_CHECK_VALUE(built.dim() == 2 && built.size(0) == T && built.size(1) == parameters[p].numel(), "built: must be [T, P]");
    auto more = built.to(plan->dtype).contiguous();
    if (block.is_of_rows) {
      auto D = parameters[p].size(1);
      more = more.view({T, -1, D}).index_add(1, at::tensor(block.tokens, at::kLong), block.gradients.view({T, -1, D})).view({T, -1});
    } else if (block.gradients.defined()) {
      more = more + block.gradients;
    }
    block = {more};
  }

  static void look_up(Block& block, std::vector<Found>& every, const Tensor& table, int64_t T) {
    auto V = table.size(0), D = table.size(1);
    if (!block.gradients.defined()) {
      std::vector<int64_t> numbers, found;
      for (auto& one : every) numbers.insert(numbers.end(), one.tokens.begin(), one.tokens.end());
      number_tokens(numbers, V, found);
      if (4 * int64_t(found.size()) < 3 * V) {
        V = found.size();
        block.is_of_rows = true;
        block.tokens = std::move(found);
        auto next = numbers.begin();
        for (auto& one : every) std::copy(next, next + one.tokens.size(), one.tokens.begin()), next += one.tokens.size();
      }
      block.gradients = at::zeros({T, V * D}, table.options().requires_grad(false));
    }
    for (auto& one : every) add_lookups(*one.rows, block.gradients.view({T, V, D}), one.values, one.tokens.data());
  }

  bool is_weighed(size_t p) const { return blocks[p].gradients.defined() && plan->components[p] >= 0; }

  // [K, T, T], once all that Python builds was added.
  Tensor grams() {
    if (taken.defined()) return taken;
    at::AutoDispatchBelowADInplaceOrView plain;
    taken = at::zeros({plan->num_components, T, T}, at::kDouble);
    auto* to = taken.mutable_data_ptr<double>();
    for (size_t p = 0; p < blocks.size(); p++)
      if (is_weighed(p)) add_gram(blocks[p].gradients, to + plan->components[p] * T * T);
    for (int64_t k = 0; k < plan->num_components; k++) mirror(to + k * T * T, T);
    return taken;
  }

  static void add_rows(const Block& block, const double* weights, const Tensor& table) {
    auto rows = at::empty({block.gradients.size(1)}, block.gradients.options());
    combine_to(block.gradients, weights, rows, false);
    auto D = table.size(1);
    AT_DISPATCH_FLOATING_TYPES(table.scalar_type(), "add_rows", [&] {
      auto* from = rows.const_data_ptr<scalar_t>();
      auto* to = table.mutable_data_ptr<scalar_t>();
      for (auto token : block.tokens) for (int64_t d = 0; d < D; d++) to[token * D + d] += *from++;
    });
  }

  // Adds the updates to `.grad`; those of parameters with hooks, or where the gradient is unusual, are returned for torch to add.
  std::vector<std::pair<int64_t, Tensor>> apply(const Tensor& given, const std::vector<int64_t>& hooked) {
    at::AutoDispatchBelowADInplaceOrView plain;
    auto weights = given.to(at::kDouble).contiguous();
    TORCH_CHECK_VALUE(weights.dim() == 2 && weights.size(0) == plan->num_components && weights.size(1) == T, "weights: must be [K, T]");
    std::vector<std::pair<int64_t, Tensor>> left;
    auto* all_weights = weights.const_data_ptr<double>();
    for (size_t p = 0; p < blocks.size(); p++) {
      auto& block = blocks[p];
      if (!is_weighed(p)) continue;
      auto& leaf = parameters[p];
      auto& grad = leaf.mutable_grad();
      bool is_free = has_own_dtype(leaf) && !std::count(hooked.begin(), hooked.end(), int64_t(p));
      bool is_added = is_free && is_plain(grad, plan->dtype) && !grad.requires_grad() && grad.sizes() == leaf.sizes() && grad.is_contiguous();
      auto options = block.gradients.options();
      auto update = is_added ? grad : block.is_of_rows ? at::zeros(leaf.sizes(), options) : at::empty(leaf.sizes(), options);
      auto* own = all_weights + plan->components[p] * T;
      if (block.is_of_rows) add_rows(block, own, update);
      else combine_to(block.gradients, own, update, is_added);
      if (is_added) grad.unsafeGetTensorImpl()->bump_version();
      else if (is_free && !grad.defined()) grad = update;
      else left.emplace_back(p, update);
    }
    blocks.clear();
    parameters.clear();
    return left;
  }
};

// A pass that runs nodes as scheduled: no queue, and no table of all of them. Torch's engine runs it as if it were one node, and
// so sets what holds in a pass, and hands on what nodes raise.
struct Pass : ag::Node {
  const Schedule& schedule;
  const Walk& walk;
  Tensors gradients;  // by slot
  Pass(const Schedule* s, const Walk* w) : ag::Node(0), schedule(*s), walk(*w), gradients(s->is_kept.size()) {}
  std::string name() const override { return "gradvac::Pass"; }

  ag::variable_list apply(ag::variable_list&& given) override {
    gradients[schedule.first] = std::move(given[0]);
    // Nodes ask it which gradients are wanted of them.
    auto& wanted = const_cast<std::unordered_map<ag::Node*, ag::GraphTask::ExecInfo>&>(*ag::get_current_graph_task_exec_info());
    for (auto& one : schedule.order) wanted[walk.nodes[one.place]].needed_ = true;
    for (auto place : schedule.places) wanted[walk.nodes[place]].needed_ = true;
    wanted[walk.nodes[0]].needed_ = false;  // or the engine would run it too
    for (auto& one : schedule.order) {
      auto& node = *walk.nodes[one.place];
      ag::variable_list taken(one.num);
      for (int64_t n = 0; n < one.num; n++) schedule.is_kept[one.slot + n] ? taken[n] = gradients[one.slot + n] : taken[n] = std::move(gradients[one.slot + n]);
      node.will_release_variables();
      auto returned = node(std::move(taken));
      taken.clear();  // what is handed through is nobody else's any more, and may be added to
      ag::validate_outputs(node.next_edges(), returned, [&](const std::string& what) { return "Function " + node.name() + " returned an " + what; });
      node.release_variables();
      for (size_t n = 0; n < returned.size(); n++)
        if (one.to[n] >= 0 && returned[n].defined()) add(gradients[one.to[n]], std::move(returned[n]));
    }
    return {Tensor()};
  }

  static void add(Tensor& sum, Tensor gradient) {
    if (!sum.defined()) return std::swap(sum, gradient);
    auto is_own = [](const Tensor& one) {
      return one.use_count() == 1 && one.has_storage() && one.storage().use_count() == 1 && one.is_non_overlapping_and_dense() && !one._is_zerotensor();
    };
    if (!is_own(sum)) std::swap(sum, gradient);
    if (is_own(sum)) sum.add_(gradient);
    else sum = sum.is_sparse() ? gradient + sum : sum + gradient;
  }
};

// One backward that hands out the output gradients of all junctions, and what follows from them; nothing if this is not what was planned.
std::shared_ptr<Step> run(const std::shared_ptr<Plan>& plan, const Tensors& parameters, const Walk& walk, const Tensors& indices, int64_t T) {
  auto is_planned = [](const Tensor& one, const void* planned) { return one.unsafeGetTensorImpl() == planned; };
  if (!std::equal(parameters.begin(), parameters.end(), plan->parameters.begin(), plan->parameters.end(), is_planned)) return nullptr;
  if (ag::AnomalyMode::is_enabled() || !walk.is_on_host) return nullptr;  // torch looks at every node, or runs it in a stream
  std::vector<Rows> rows;
  for (auto& index : indices) {
    if (!fits(index, T)) return nullptr;
    rows.emplace_back(index, T);
  }
  std::vector<Operands> operands(plan->junctions.size());
  Captured capture{*plan, parameters, walk, rows};
  for (size_t n = 0; n < operands.size(); n++)
    if (!capture(plan->junctions[n], operands[n])) return nullptr;
  if (!plan->schedule.fits(walk)) {
    std::vector<int64_t> places;
    for (auto& one : plan->junctions) places.push_back(one.node);
    for (auto place : plan->others) {
      if (place < 0 || place >= int64_t(walk.nodes.size()) || walk.nodes[place]->num_inputs() != 1) return nullptr;
      places.push_back(place);
    }
    plan->schedule.make(walk, places);
  }
  Tensors gradients;
  {
    at::AutoDispatchBelowADInplaceOrView plain;
    gradients = {at::ones_like(walk.root)};
  }
  auto pass = make_tap<Pass>(&plan->schedule, &walk);
  ag::Edge first(walk.first, walk.root.output_nr());
  pass->add_input_metadata(walk.root);
  pass->add_next_edge(first);
  ag::Engine::get_default_engine().execute({ag::Edge(pass, 0)}, gradients, false, false, false, {first});
  gradients.clear();
  for (auto slot : plan->schedule.ends) gradients.push_back(std::move(pass->gradients[slot]));
  auto step = std::make_shared<Step>(plan, parameters, rows, operands, gradients, T);
  if (plan->is_whole()) step->grams();  // at once: every call from Python is slow after a backward
  return step;
}

// -- junctions on the way of a pass ---------------------------------------------------------------------

// Catches what plain junctions need to be built, as their output gradients arrive, and counts which groups of junctions are complete.
// Python is called when more waits than may (`overflow`), when groups are complete (`done`), and for what is not plain after all (`other`).
class Arrivals : public std::enable_shared_from_this<Arrivals> {
 public:
  enum class Node { addmm, mm, layer_norm, rms_norm, mul, expand, tap, end };  // end: an expansion at which the pass ends
  using Given = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;  // number, place in the walk, node, edge of a factor; those of equal numbers may be alike; number of where rows lie
  using Group = std::tuple<std::vector<int64_t>, Tensors, std::vector<Tensors>, int64_t>;  // numbers of alike junctions, output gradients, what nodes saved (`Alike`); where rows lie

  Arrivals(const Walk& walk, const std::vector<Given>& every, std::vector<std::vector<int64_t>> groups, double freed_share, py::function overflow, py::function done, py::function other)
      : first_(walk.first), groups_(std::move(groups)), freed_share_(freed_share), overflow_(std::move(overflow)), done_(std::move(done)), other_(std::move(other)) {
    for (auto& of_junction : groups_) for (auto group : of_junction) num_left_[group]++;
    for (auto& [number, place, node, edge, like, rows] : every) {
      junctions_.push_back({number, walk.nodes.at(place), Node(node), edge, like, rows});
      if (!read(junctions_.back(), nullptr)) junctions_.pop_back();
    }
  }

  // Hangs hooks on the nodes; the numbers of the junctions that are caught.
  std::vector<int64_t> start() {
    std::vector<int64_t> numbers;
    for (size_t n = 0; n < junctions_.size(); n++) {
      auto hook = std::make_unique<Arrive>(shared_from_this(), n);
      auto& one = junctions_[n];
      one.kind == Node::end ? one.node->add_tensor_pre_hook(std::move(hook)) : one.node->add_pre_hook(std::move(hook));
      numbers.push_back(one.number);
    }
    return numbers;
  }

  // The pass is over: no hook is left.
  void stop() {
    is_over_ = true;
    for (auto& one : junctions_) one.node->pre_hooks().clear(), one.node->tensor_pre_hooks().clear();  // there were no others
    junctions_.clear();
    caught_.clear();  // hooks that hang on the nodes know us, and so would what these nodes saved
    first_.reset();
    overflow_ = done_ = other_ = py::function();  // what hangs on nodes may be freed without the GIL
  }

  // What was caught, by what can be built together.
  std::vector<Group> take() {
    std::vector<Group> groups;
    std::map<std::vector<int64_t>, size_t> places;
    for (auto& [one, gradient, saved] : std::exchange(caught_, {})) {
      flatten(one, gradient, saved);
      auto& first = saved.empty() ? gradient : saved[0];
      std::vector<int64_t> key{one.like, one.rows, int64_t(gradient.scalar_type()), int64_t(first.scalar_type()), gradient.dim()};
      for (auto* part : {&gradient, &first}) key.insert(key.end(), part->sizes().begin(), part->sizes().end());
      auto [place, is_new] = places.emplace(std::move(key), groups.size());
      if (is_new) groups.emplace_back(std::vector<int64_t>(), Tensors(), std::vector<Tensors>(saved.size()), one.rows);
      auto& [numbers, gradients, every, _] = groups[place->second];
      numbers.push_back(one.number);
      gradients.push_back(std::move(gradient));
      for (size_t i = 0; i < saved.size(); i++) every[i].push_back(std::move(saved[i]));
    }
    return groups;
  }

  // Bytes of what was caught, and what the pass has freed, since it was asked last.
  std::pair<double, double> take_counts() { return {std::exchange(operands_, 0.), std::exchange(freed_, 0.)}; }

  // How much may be caught; beyond, as much as is freed beyond `slack`.
  void allow(double room, double slack) { room_ = room, slack_ = slack; }

  // The groups that are complete now that a junction has arrived.
  std::vector<int64_t> count(int64_t number) {
    std::vector<int64_t> complete;
    for (auto group : groups_.at(number)) if (!--num_left_.at(group)) complete.push_back(group);
    return complete;
  }

 private:
  struct One {
    int64_t number;
    ag::Node* node;
    Node kind;
    int64_t edge, like, rows;
    bool is_of_region() const { return kind == Node::tap || kind == Node::end; }
  };

  struct Caught { One one; Tensor gradient; Tensors saved; };

  // As matrices, unless a factor was broadcast.
  static void flatten(const One& one, Tensor& gradient, Tensors& saved) {
    if (one.kind == Node::mul && saved[0].sizes() != gradient.sizes()) return;
    auto width = gradient.size(-1), num = gradient.numel() / width;
    gradient = gradient.reshape({num, width});
    for (auto& part : saved) part = part.reshape({num, part.numel() / num});
  }

  struct Arrive : ag::FunctionPreHook {
    std::shared_ptr<Arrivals> arrivals;
    size_t n;
    Arrive(std::shared_ptr<Arrivals> a, size_t number) : arrivals(std::move(a)), n(number) {}
    ag::variable_list operator()(const ag::variable_list& gradients) override {
      py::gil_scoped_acquire gil;  // other threads may have junctions too
      if (arrivals->is_over_) return gradients;
      One one(arrivals->junctions_[n]);
      arrivals->arrive(one, gradients);
      return one.is_of_region() ? ag::variable_list(gradients.size()) : gradients;  // which nobody else needs
    }
  };

  struct Complete : ag::FunctionPostHook {
    std::shared_ptr<Arrivals> arrivals;
    std::vector<int64_t> groups;
    Complete(std::shared_ptr<Arrivals> a, std::vector<int64_t> g) : arrivals(std::move(a)), groups(std::move(g)) {}
    ag::variable_list operator()(const ag::variable_list& returned, const ag::variable_list&) override {
      py::gil_scoped_acquire gil;
      if (!arrivals->is_over_) call(arrivals->done_, groups);
      return returned;
    }
  };

  template <class... Values>  // with the GIL
  static void call(const py::function& function, const Values&... values) {
    try {
      function(values...);
    } catch (py::error_already_set& error) {  // as torch hands on what Python's hooks raise
      error.restore();
      python_error raised;
      raised.persist();
      throw raised;
    }
  }

  // What a node saved; false, and nothing, if it is not to be read here.
  static bool read(const One& one, Tensors* to) {
    auto take = [&](auto* node, auto... fields) {
      if (!node || (... || (node->*fields).has_hooks())) return false;  // a checkpoint, or on the host
      if (to) (to->push_back((node->*fields).unpack(node->getptr())), ...);
      return true;
    };
    switch (one.kind) {
      case Node::addmm: {
        auto* node = dynamic_cast<gen::AddmmBackward0*>(one.node);
        return node && is_one(node->alpha) && is_one(node->beta) && take(node, OF(AddmmBackward0, mat1_));
      }
      case Node::mm: return take(dynamic_cast<gen::MmBackward0*>(one.node), OF(MmBackward0, self_));
      case Node::layer_norm: return take(dynamic_cast<gen::NativeLayerNormBackward0*>(one.node), OF(NativeLayerNormBackward0, input_), OF(NativeLayerNormBackward0, result1_), OF(NativeLayerNormBackward0, result2_));
      case Node::rms_norm: return take(dynamic_cast<gen::FusedRmsNormBackward0*>(one.node), OF(FusedRmsNormBackward0, input_), OF(FusedRmsNormBackward0, result1_));
      case Node::mul: {
        auto* node = dynamic_cast<gen::MulBackward0*>(one.node);
        return one.edge == 0 ? take(node, OF(MulBackward0, other_)) : take(node, OF(MulBackward0, self_));
      }
      case Node::expand: return dynamic_cast<gen::ExpandBackward0*>(one.node) != nullptr;
      case Node::end: return dynamic_cast<gen::ExpandBackward0*>(one.node) && mark_of(one.node);
      case Node::tap: return dynamic_cast<ProductTap*>(one.node) != nullptr;  // which is handed its operand
    }
    return false;
  }

  void arrive(const One& one, const ag::variable_list& gradients) {
    bool is_usual = gradients[0].defined() && gradients[0].numel();
    for (size_t n = 1; n < gradients.size(); n++) is_usual &= gradients[n].defined() == (one.kind == Node::tap);
    if (!is_usual) {
      std::vector<std::optional<Tensor>> given;
      for (auto& gradient : gradients) given.push_back(gradient.defined() ? std::optional<Tensor>(gradient) : std::nullopt);
      return call(other_, one.number, given);
    }
    Tensors saved;
    TORCH_CHECK(read(one, &saved), "a node is not as it was before the pass");
    if (one.kind == Node::tap) saved.push_back(gradients[1].flatten(0, -2));
    auto bytes = double(gradients[0].nbytes()) + (saved.empty() ? 0. : double(saved[0].nbytes()));
    caught_.push_back({one, gradients[0], std::move(saved)});
    operands_ += bytes;
    freed_ += freed_share_ * bytes;
    if (operands_ > room_ + std::max(0., slack_ + freed_)) call(overflow_);
    auto complete = count(one.number);
    if (complete.empty()) return;
    if (one.kind == Node::end) call(done_, complete);
    else one.node->add_post_hook(std::make_unique<Complete>(shared_from_this(), std::move(complete)));
  }

  decltype(Walk::first) first_;  // keeps the nodes
  std::vector<One> junctions_;
  std::vector<std::vector<int64_t>> groups_;  // of every junction, by its number
  std::unordered_map<int64_t, int64_t> num_left_;
  double freed_share_, operands_ = 0., freed_ = 0., room_ = 0., slack_ = 0.;
  py::function overflow_, done_, other_;
  std::vector<Caught> caught_;
  bool is_over_ = false;
};

}  // namespace

void add_executor(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("region_inputs", &region_inputs);
  m.def("memory_of", &memory_of);
  py::class_<Content, std::shared_ptr<Content>>(m, "Content")
      .def("__hash__", [](const Content& one) { return one.print; })
      .def("__eq__", [](const Content& one, const Content& other) { return one == other; });
  py::class_<Walk>(m, "Walk")
      .def(py::init<Tensor>())
      .def("learn", &Walk::learn)
      .def_readonly("content", &Walk::content)
      .def_readonly("oldest", &Walk::oldest)
      .def_readonly("has_hooks", &Walk::has_hooks)
      .def_property_readonly("is_known", [](const Walk& walk) { return walk.content->is_known; })
      .def("node", [](const Walk& walk, int64_t place) { return py::reinterpret_steal<py::object>(ag::functionToPyObject(walk.nodes.at(place)->getptr())); });
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def(py::init<const Walk&, std::vector<Arrivals::Given>, std::vector<std::vector<int64_t>>, double, py::function, py::function, py::function>())
      .def("start", &Arrivals::start)
      .def("stop", &Arrivals::stop)
      .def("take", &Arrivals::take)
      .def("take_counts", &Arrivals::take_counts)
      .def("allow", &Arrivals::allow)
      .def("count", &Arrivals::count);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init<std::vector<GivenJunction>, Tensors, std::vector<int64_t>, int64_t, std::vector<int64_t>>())
      .def("run", &run, NoGil())
      .def("release", &Plan::release, NoGil());
  py::class_<Step, std::shared_ptr<Step>>(m, "Step")
      .def_readonly("others", &Step::others)
      .def("made", &Step::made)
      .def("add", &Step::add)
      .def("grams", &Step::grams, NoGil())
      .def("apply", &Step::apply, NoGil());
}

}  // namespace gradvac
