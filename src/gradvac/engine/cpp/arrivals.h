// Junctions on the way of a pass: collects what they are built from.

#pragma once

#include <torch/csrc/Exceptions.h>

#include "graphs.h"

namespace gradvac {

// Catches what plain junctions need to be built, as their output gradients arrive, and counts which
// groups of junctions are complete. Python is called when more waits than may (`overflow`), when
// groups are complete (`done`), and for what is not plain after all (`other`).
class Arrivals : public std::enable_shared_from_this<Arrivals> {
 public:
  // End: an expansion at which the pass ends.
  enum class Node { addmm, mm, layer_norm, rms_norm, mul, expand, tap, end };
  // Number, place in the walk, node, edge of a factor; those of equal numbers may be alike; number
  // of where rows lie.
  using Given = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
  // Numbers of alike junctions, output gradients, what nodes saved (`Alike`); where rows lie.
  using Group = std::tuple<std::vector<int64_t>, Tensors, std::vector<Tensors>, int64_t>;

  Arrivals(const Walk& walk, const std::vector<Given>& every,
           std::vector<std::vector<int64_t>> groups, double freed_share, py::function overflow,
           py::function done, py::function other)
      : first_(walk.first),
        groups_(std::move(groups)),
        freed_share_(freed_share),
        overflow_(std::move(overflow)),
        done_(std::move(done)),
        other_(std::move(other)) {
    for (auto& of_junction : groups_)
      for (auto group : of_junction) num_left_[group]++;
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
      one.kind == Node::end ? one.node->add_tensor_pre_hook(std::move(hook))
                            : one.node->add_pre_hook(std::move(hook));
      numbers.push_back(one.number);
    }
    return numbers;
  }

  // The pass is over: no hook is left.
  void stop() {
    is_over_ = true;
    for (auto& one : junctions_)
      one.node->pre_hooks().clear(), one.node->tensor_pre_hooks().clear();  // there were no others
    junctions_.clear();
    caught_.clear();  // hooks that hang on the nodes know us, and so would what these nodes saved
    first_.reset();
    // What hangs on nodes may be freed without the GIL.
    overflow_ = done_ = other_ = py::function();
  }

  // What was caught, by what can be built together.
  std::vector<Group> take() {
    std::vector<Group> groups;
    std::map<std::vector<int64_t>, size_t> places;
    for (auto& [one, gradient, saved] : std::exchange(caught_, {})) {
      flatten(one, gradient, saved);
      auto& first = saved.empty() ? gradient : saved[0];
      std::vector<int64_t> key{one.like, one.rows, int64_t(gradient.scalar_type()),
                               int64_t(first.scalar_type()), gradient.dim()};
      for (auto* part : {&gradient, &first})
        key.insert(key.end(), part->sizes().begin(), part->sizes().end());
      auto [place, is_new] = places.emplace(std::move(key), groups.size());
      if (is_new)
        groups.emplace_back(std::vector<int64_t>(), Tensors(), std::vector<Tensors>(saved.size()),
                            one.rows);
      auto& [numbers, gradients, every, _] = groups[place->second];
      numbers.push_back(one.number);
      gradients.push_back(std::move(gradient));
      for (size_t i = 0; i < saved.size(); i++) every[i].push_back(std::move(saved[i]));
    }
    return groups;
  }

  // Bytes of what was caught, and what the pass has freed, since it was asked last.
  std::pair<double, double> take_counts() {
    return {std::exchange(operands_, 0.), std::exchange(freed_, 0.)};
  }

  // How much may be caught; beyond, as much as is freed beyond `slack`.
  void allow(double room, double slack) { room_ = room, slack_ = slack; }

  // The groups that are complete now that a junction has arrived.
  std::vector<int64_t> count(int64_t number) {
    std::vector<int64_t> complete;
    for (auto group : groups_.at(number))
      if (!--num_left_.at(group)) complete.push_back(group);
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

  struct Caught {
    One one;
    Tensor gradient;
    Tensors saved;
  };

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
      return one.is_of_region() ? ag::variable_list(gradients.size())
                                : gradients;  // which nobody else needs
    }
  };

  struct Complete : ag::FunctionPostHook {
    std::shared_ptr<Arrivals> arrivals;
    std::vector<int64_t> groups;
    Complete(std::shared_ptr<Arrivals> a, std::vector<int64_t> g)
        : arrivals(std::move(a)), groups(std::move(g)) {}
    ag::variable_list operator()(const ag::variable_list& returned,
                                 const ag::variable_list&) override {
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
      if (!node || (... || (node->*fields).has_hooks()))
        return false;  // a checkpoint, or on the host
      if (to) (to->push_back((node->*fields).unpack(node->getptr())), ...);
      return true;
    };
    switch (one.kind) {
      case Node::addmm: {
        auto* node = dynamic_cast<gen::AddmmBackward0*>(one.node);
        return node && is_one(node->alpha) && is_one(node->beta) &&
               take(node, OF(AddmmBackward0, mat1_));
      }
      case Node::mm:
        return take(dynamic_cast<gen::MmBackward0*>(one.node), OF(MmBackward0, self_));
      case Node::layer_norm:
        return take(dynamic_cast<gen::NativeLayerNormBackward0*>(one.node),
                    OF(NativeLayerNormBackward0, input_), OF(NativeLayerNormBackward0, result1_),
                    OF(NativeLayerNormBackward0, result2_));
      case Node::rms_norm:
        return take(dynamic_cast<gen::FusedRmsNormBackward0*>(one.node),
                    OF(FusedRmsNormBackward0, input_), OF(FusedRmsNormBackward0, result1_));
      case Node::mul: {
        auto* node = dynamic_cast<gen::MulBackward0*>(one.node);
        return one.edge == 0 ? take(node, OF(MulBackward0, other_))
                             : take(node, OF(MulBackward0, self_));
      }
      case Node::expand:
        return dynamic_cast<gen::ExpandBackward0*>(one.node) != nullptr;
      case Node::end:
        return dynamic_cast<gen::ExpandBackward0*>(one.node) && mark_of(one.node);
      case Node::tap:
        return dynamic_cast<ProductTap*>(one.node) != nullptr;  // which is handed its operand
    }
    return false;
  }

  void arrive(const One& one, const ag::variable_list& gradients) {
    bool is_usual = gradients[0].defined() && gradients[0].numel();
    for (size_t n = 1; n < gradients.size(); n++)
      is_usual &= gradients[n].defined() == (one.kind == Node::tap);
    if (!is_usual) {
      std::vector<std::optional<Tensor>> given;
      for (auto& gradient : gradients)
        given.push_back(gradient.defined() ? std::optional<Tensor>(gradient) : std::nullopt);
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
    if (one.kind == Node::end)
      call(done_, complete);
    else
      one.node->add_post_hook(std::make_unique<Complete>(shared_from_this(), std::move(complete)));
  }

  Walk::Pointer first_;  // keeps the nodes
  std::vector<One> junctions_;
  std::vector<std::vector<int64_t>> groups_;  // of every junction, by its number
  std::unordered_map<int64_t, int64_t> num_left_;
  double freed_share_, operands_ = 0., freed_ = 0., room_ = 0., slack_ = 0.;
  py::function overflow_, done_, other_;
  std::vector<Caught> caught_;
  bool is_over_ = false;
};

}  // namespace gradvac
