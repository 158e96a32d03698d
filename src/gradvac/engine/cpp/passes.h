// A pass over a graph that runs its nodes in an order worked out before.

#pragma once

#include <torch/csrc/autograd/engine.h>

#include <queue>

#include "graphs.h"

namespace gradvac {

// In which order a pass to some nodes runs those above them, and where gradients go meanwhile.
struct Schedule {
  // Slots of a node's gradients, and of those that it returns (-1: none).
  struct One {
    int64_t place, slot, num;
    std::vector<int64_t> to;
  };
  std::shared_ptr<Content> of;  // graphs
  std::vector<One> order;
  std::vector<int64_t> places, ends;  // of these, and their slots
  std::vector<bool> is_kept;          // slots of ends
  int64_t first;                      // slot

  bool fits(const Walk& walk) const {
    return of && of->is_known && walk.content->is_known && *of == *walk.content;
  }

  void make(const Walk& walk, std::vector<int64_t> of_ends) {
    places = std::move(of_ends);
    auto& nodes = walk.nodes;
    std::unordered_map<const ag::Node*, int64_t> index;
    std::vector<int64_t> slots(nodes.size() + 1), num_left(nodes.size());
    for (size_t n = 0; n < nodes.size(); n++)
      index[nodes[n]] = int64_t(n), slots[n + 1] = slots[n] + nodes[n]->num_inputs();
    auto place_of = [&](const ag::Edge& edge) {
      return edge.function ? index.at(edge.function.get()) : -1;
    };
    for (auto* node : nodes)
      for (auto& edge : node->next_edges())
        if (edge.function) num_left[place_of(edge)]++;
    std::vector<int64_t> every;
    std::priority_queue<std::pair<uint64_t, int64_t>> ready;  // the youngest first, as in torch
    for (ready.emplace(0, 0); !ready.empty();) {
      auto place = ready.top().second;
      ready.pop();
      every.push_back(place);
      for (auto& edge : nodes[place]->next_edges())
        if (edge.function && !--num_left[place_of(edge)])
          ready.emplace(edge.function->sequence_nr(), place_of(edge));
    }
    std::vector<bool> is_on_way(nodes.size());
    order.clear(), ends.clear();
    is_kept.assign(slots.back(), false);
    for (auto place : places)
      is_on_way[place] = is_kept[slots[place]] = true, ends.push_back(slots[place]);
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

// A pass that runs nodes as scheduled: no queue, and no table of all of them. Torch's engine runs
// it as if it were one node, and so sets what holds in a pass, and hands on what nodes raise.
struct Pass : ag::Node {
  const Schedule& schedule;
  const Walk& walk;
  Tensors gradients;  // by slot
  Pass(const Schedule* s, const Walk* w)
      : ag::Node(0), schedule(*s), walk(*w), gradients(s->is_kept.size()) {}
  std::string name() const override { return "gradvac::Pass"; }

  ag::variable_list apply(ag::variable_list&& given) override {
    gradients[schedule.first] = std::move(given[0]);
    // Nodes ask it which gradients are wanted of them.
    auto& wanted = const_cast<std::unordered_map<ag::Node*, ag::GraphTask::ExecInfo>&>(
        *ag::get_current_graph_task_exec_info());
    for (auto& one : schedule.order) wanted[walk.nodes[one.place]].needed_ = true;
    for (auto place : schedule.places) wanted[walk.nodes[place]].needed_ = true;
    wanted[walk.nodes[0]].needed_ = false;  // or the engine would run it too
    for (auto& one : schedule.order) {
      auto& node = *walk.nodes[one.place];
      check(node);
      ag::variable_list taken(one.num);
      for (int64_t n = 0; n < one.num; n++)
        schedule.is_kept[one.slot + n] ? taken[n] = gradients[one.slot + n]
                                       : taken[n] = std::move(gradients[one.slot + n]);
      node.will_release_variables();
      auto returned = node(std::move(taken));
      taken.clear();  // what is handed through is nobody else's any more, and may be added to
      ag::validate_outputs(node.next_edges(), returned, [&](const std::string& what) {
        return "Function " + node.name() + " returned an " + what;
      });
      node.release_variables();
      for (size_t n = 0; n < returned.size(); n++)
        if (one.to[n] >= 0 && returned[n].defined())
          add(gradients[one.to[n]], std::move(returned[n]));
    }
    for (auto place : schedule.places) check(*walk.nodes[place]);
    return {Tensor()};
  }

  // What nodes saved may be unpacked by functions in Python, which may do anything.
  static void check(ag::Node& node) {
    TORCH_CHECK_VALUE(!is_hooked(node), "backward: a hook of ", node.name(),
                      " was registered during the backward, where C++ runs no hooks. Register it "
                      "before the backward, or set GRADVAC_NATIVE=0");
  }

  static void add(Tensor& sum, Tensor gradient) {
    if (!sum.defined()) return std::swap(sum, gradient);
    auto is_own = [](const Tensor& one) {
      return one.use_count() == 1 && one.has_storage() && one.storage().use_count() == 1 &&
             one.is_non_overlapping_and_dense() && !one._is_zerotensor();
    };
    if (!is_own(sum)) std::swap(sum, gradient);
    if (is_own(sum))
      sum.add_(gradient);
    else
      sum = sum.is_sparse() ? gradient + sum : sum + gradient;
  }
};

}  // namespace gradvac
