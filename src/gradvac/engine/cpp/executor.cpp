// Executes plans of small steps on a CPU without Python in between; see executor.py.
//
// K components, T tasks, B rows, N entries, D width, P entries of a parameter, V rows of a table, U
// of them that are used

#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>

#include "arrivals.h"
#include "graphs.h"
#include "passes.h"

namespace gradvac {

namespace {

// -- a plan ------------------------------------------------------------

// Table: of a lookup that all rows share, added to what they have.
enum class Kind { product, norm, scale, sum, lookup, table };

struct Junction {
  Kind kind;
  int64_t node, weight, shift;  // places in the walk, and of parameters; -1: none
  bool is_transposed;
  int64_t edge, below;  // a scale's; the lookup of a table
  int64_t rows;         // whose index
};
using GivenJunction =
    std::tuple<int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t, int64_t>;

struct Plan {
  std::vector<Junction> junctions;
  std::vector<const void*> parameters;  // which; whoever has them may still swap them for others
  std::vector<int64_t> components;      // theirs; -1: what Python made of parameters
  int64_t num_components;
  std::vector<int64_t> others;  // places of junctions that Python builds
  at::ScalarType dtype;
  Schedule schedule;

  Plan(const std::vector<GivenJunction>& given, const Tensors& every,
       std::vector<int64_t> components_, int64_t num_components_, std::vector<int64_t> others_)
      : components(std::move(components_)),
        num_components(num_components_),
        others(std::move(others_)),
        dtype(every.at(0).scalar_type()) {
    for (auto& one : every) parameters.push_back(one.unsafeGetTensorImpl());
    for (auto& [kind, node, weight, shift, is_transposed, edge, below, rows] : given)
      junctions.push_back({Kind(kind), node, weight, shift, is_transposed, edge, below, rows});
  }

  // Frees what nodes saved at which the pass ended, which did not run.
  void release(const Walk& walk) const {
    for (auto place : schedule.places) walk.nodes[place]->release_variables();
  }

  // Whether Python builds nothing.
  bool is_whole() const {
    return others.empty() && !std::count(components.begin(), components.end(), -1);
  }
};

template <class Node>
Node* as(const Walk& walk, int64_t place) {
  return place >= 0 && place < int64_t(walk.nodes.size()) ? dynamic_cast<Node*>(walk.nodes[place])
                                                          : nullptr;
}

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
    if (!node || node->scale_grad_by_freq || node->sparse || node->indices_.has_hooks() ||
        node->padding_idx.is_symbolic())
      return false;
    auto tokens = node->indices_.unpack(node->getptr());
    if (!is_plain(tokens, tokens.scalar_type()) ||
        (tokens.scalar_type() != at::kLong && tokens.scalar_type() != at::kInt))
      return false;
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
    if (one.node < 0 || one.node >= int64_t(walk.nodes.size()) ||
        !walk.nodes[one.node]->num_inputs())
      return false;
    to.shape = walk.shape(one.node);
    int64_t numel = c10::multiply_integers(to.shape), B = rows[one.rows].num;
    auto& weight = parameters[one.weight];
    if (to.shape.empty() || !numel) return false;
    auto D = to.shape.back(), N = numel / D;
    if (N % B) return false;
    auto is_like = [&](const std::optional<Tensor>& value, int64_t size) {
      return !value || value->numel() == size;
    };
    auto is_vector = [&](int64_t number) { return number < 0 || parameters[number].numel() == D; };
    switch (one.kind) {
      case Kind::product: {
        bool is_read = false;
        if (auto* addmm = as<gen::AddmmBackward0>(walk, one.node))
          is_read = is_one(addmm->alpha) && is_one(addmm->beta) && read(addmm->mat1_, addmm, to.x);
        else if (auto* mm = as<gen::MmBackward0>(walk, one.node))
          is_read = read(mm->self_, mm, to.x);
        return is_read && to.x->dim() == 2 && to.x->size(0) == N &&
               weight.numel() == D * to.x->size(1) && is_vector(one.shift);
      }
      case Kind::norm: {
        bool is_read = false;
        if (auto* norm = as<gen::NativeLayerNormBackward0>(walk, one.node))
          is_read = read(norm->input_, norm, to.x) && read(norm->result1_, norm, to.mean) &&
                    read(norm->result2_, norm, to.scale);
        else if (auto* rms = as<gen::FusedRmsNormBackward0>(walk, one.node))
          is_read = read(rms->input_, rms, to.x) && read(rms->result1_, rms, to.scale);
        return is_read && is_like(to.x, numel) && is_like(to.mean, N) && is_like(to.scale, N) &&
               is_vector(one.weight) && is_vector(one.shift);
      }
      case Kind::scale: {
        auto* mul = as<gen::MulBackward0>(walk, one.node);
        return mul && read(one.edge == 0 ? mul->other_ : mul->self_, mul, to.x) &&
               to.x->sizes() == to.shape && is_vector(one.weight);
      }
      case Kind::sum: {  // over all entries, or over rows alone
        auto* add = as<gen::AddBackward0>(walk, one.node);
        bool is_known = add ? one.edge == 0 || is_one(add->alpha)
                            : as<gen::ExpandBackward0>(walk, one.node) != nullptr;
        return is_known && (is_vector(one.weight) || weight.numel() * B == numel);
      }
      case Kind::lookup:
        return read_tokens(as<gen::EmbeddingBackward0>(walk, one.node), one.weight, to.tokens) &&
               int64_t(to.tokens.size()) == N && weight.numel() == weight.size(0) * D;
      case Kind::table: {
        auto* add = as<gen::AddBackward0>(walk, one.node);
        if (!add || (one.edge && !is_one(add->alpha)) ||
            !read_tokens(as<gen::EmbeddingBackward0>(walk, one.below), one.weight, to.tokens))
          return false;
        return int64_t(to.tokens.size()) * B == N && weight.numel() == weight.size(0) * D;
      }
    }
    return false;
  }
};

// -- a step ------------------------------------------------------------

struct Block {
  Tensor gradients;  // [T, P], of all entries or of those of some rows
  bool is_of_rows = false;
  std::vector<int64_t> tokens;  // these rows, of a table that is only looked up
};

struct Step {
  std::shared_ptr<Plan> plan;
  Tensors parameters;
  int64_t T;
  std::vector<Block> blocks;                  // by parameter; undefined where no gradient came
  std::vector<std::optional<Tensor>> others;  // output gradients of junctions that Python builds
  Tensor taken;                               // Gram matrices

  struct Found {
    const Rows* rows;
    Tensor values;
    std::vector<int64_t> tokens;
  };

  Step(std::shared_ptr<Plan> given, const Tensors& every, const std::vector<Rows>& rows,
       std::vector<Operands>& operands, std::vector<Tensor>& gradients, int64_t T)
      : plan(std::move(given)), parameters(every), T(T), blocks(every.size()) {
    at::AutoDispatchBelowADInplaceOrView plain;  // nothing here is differentiated
    for (auto n = operands.size(); n < gradients.size(); n++)
      others.push_back(gradients[n].defined() ? std::optional<Tensor>(gradients[n]) : std::nullopt);
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
          add_products(own, *given_to.x, g, one.is_transposed,
                       block.view({T, one.is_transposed ? O : I, one.is_transposed ? I : O}),
                       is_first);
          given_to.x.reset();
          break;
        }
        case Kind::lookup:
          lookups[one.weight].push_back({&own, std::move(g), std::move(given_to.tokens)});
          break;
        case Kind::table: {
          auto sums = at::zeros({T, g.numel() / own.num}, options);
          add_sums(own, sums, g);
          std::vector<int64_t> tokens;
          for (int64_t t = 0; t < T; t++)
            tokens.insert(tokens.end(), given_to.tokens.begin(), given_to.tokens.end());
          lookups[one.weight].push_back({&by_task, sums, std::move(tokens)});
          break;
        }
        default:
          sums_of(one.weight, g);
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
      if (plan->components[p] < 0)
        every.push_back(blocks[p].gradients.defined() ? std::optional<Tensor>(blocks[p].gradients)
                                                      : std::nullopt);
    return every;
  }

  // Adds task gradients [T, P] that Python has built.
  void add(int64_t p, const Tensor& built) {
    at::AutoDispatchBelowADInplaceOrView plain;
    auto& block = blocks.at(p);
    TORCH_CHECK_VALUE(
        built.dim() == 2 && built.size(0) == T && built.size(1) == parameters[p].numel(),
        "built: must be [T, P]");
    auto more = built.to(plan->dtype).contiguous();
    if (block.is_of_rows) {
      auto D = parameters[p].size(1);
      more =
          more.view({T, -1, D})
              .index_add(1, at::tensor(block.tokens, at::kLong), block.gradients.view({T, -1, D}))
              .view({T, -1});
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
        for (auto& one : every)
          std::copy(next, next + one.tokens.size(), one.tokens.begin()), next += one.tokens.size();
      }
      block.gradients = at::zeros({T, V * D}, table.options().requires_grad(false));
    }
    for (auto& one : every)
      add_lookups(*one.rows, block.gradients.view({T, V, D}), one.values, one.tokens.data());
  }

  bool is_weighed(size_t p) const {
    return blocks[p].gradients.defined() && plan->components[p] >= 0;
  }

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
      for (auto token : block.tokens)
        for (int64_t d = 0; d < D; d++) to[token * D + d] += *from++;
    });
  }

  // Adds the updates to `.grad`; those of parameters with hooks, or where the gradient is unusual,
  // are returned for torch to add.
  std::vector<std::pair<int64_t, Tensor>> apply(const Tensor& given,
                                                const std::vector<int64_t>& hooked) {
    at::AutoDispatchBelowADInplaceOrView plain;
    auto weights = given.to(at::kDouble).contiguous();
    TORCH_CHECK_VALUE(
        weights.dim() == 2 && weights.size(0) == plan->num_components && weights.size(1) == T,
        "weights: must be [K, T]");
    std::vector<std::pair<int64_t, Tensor>> left;
    auto* all_weights = weights.const_data_ptr<double>();
    for (size_t p = 0; p < blocks.size(); p++) {
      auto& block = blocks[p];
      if (!is_weighed(p)) continue;
      auto& leaf = parameters[p];
      auto& grad = leaf.mutable_grad();
      bool is_free = has_own_dtype(leaf) && !std::count(hooked.begin(), hooked.end(), int64_t(p));
      bool is_added = is_free && is_plain(grad, plan->dtype) && !grad.requires_grad() &&
                      grad.sizes() == leaf.sizes() && grad.is_contiguous();
      auto options = block.gradients.options();
      auto update = is_added           ? grad
                    : block.is_of_rows ? at::zeros(leaf.sizes(), options)
                                       : at::empty(leaf.sizes(), options);
      auto* own = all_weights + plan->components[p] * T;
      if (block.is_of_rows)
        add_rows(block, own, update);
      else
        combine_to(block.gradients, own, update, is_added);
      if (is_added)
        grad.unsafeGetTensorImpl()->bump_version();
      else if (is_free && !grad.defined())
        grad = update;
      else
        left.emplace_back(p, update);
    }
    blocks.clear();
    parameters.clear();
    return left;
  }
};

// One backward that hands out the output gradients of all junctions, and what follows from them;
// nothing if this is not what was planned.
std::shared_ptr<Step> run(const std::shared_ptr<Plan>& plan, const Tensors& parameters,
                          const Walk& walk, const Tensors& indices, int64_t T) {
  auto is_planned = [](const Tensor& one, const void* planned) {
    return one.unsafeGetTensorImpl() == planned;
  };
  if (!std::equal(parameters.begin(), parameters.end(), plan->parameters.begin(),
                  plan->parameters.end(), is_planned))
    return nullptr;
  if (ag::AnomalyMode::is_enabled() || !walk.is_on_host)
    return nullptr;  // torch looks at every node, or runs it in a stream
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
      if (place < 0 || place >= int64_t(walk.nodes.size()) || walk.nodes[place]->num_inputs() != 1)
        return nullptr;
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
  ag::Engine::get_default_engine().execute({ag::Edge(pass, 0)}, gradients, false, false, false,
                                           {first});
  gradients.clear();
  for (auto slot : plan->schedule.ends) gradients.push_back(std::move(pass->gradients[slot]));
  auto step = std::make_shared<Step>(plan, parameters, rows, operands, gradients, T);
  if (plan->is_whole()) step->grams();  // at once: every call from Python is slow after a backward
  return step;
}

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
      .def("node", [](const Walk& walk, int64_t place) {
        return py::reinterpret_steal<py::object>(
            ag::functionToPyObject(walk.nodes.at(place)->getptr()));
      });
  py::class_<Arrivals, std::shared_ptr<Arrivals>>(m, "Arrivals")
      .def(py::init<const Walk&, std::vector<Arrivals::Given>, std::vector<std::vector<int64_t>>,
                    double, py::function, py::function, py::function>())
      .def("start", &Arrivals::start)
      .def("stop", &Arrivals::stop)
      .def("take", &Arrivals::take)
      .def("take_counts", &Arrivals::take_counts)
      .def("allow", &Arrivals::allow)
      .def("count", &Arrivals::count);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init<std::vector<GivenJunction>, Tensors, std::vector<int64_t>, int64_t,
                    std::vector<int64_t>>())
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
