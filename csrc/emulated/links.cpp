// The cost model of copies: flows of bytes that share links. A copy takes copy_us, then its bytes flow at the rate
// that its link, its uplink, host memory and the flows beside it leave (max-min fair, changing as flows come and go).
#include <algorithm>

#include "world.h"

namespace AR_NS {

struct FlowLimit {
  double left;                 // bytes per us
  std::vector<Flight*> flows;  // that have no rate yet
};

static double to_rate(double gbs) { return gbs * 1e3; }

// Gives every flow its rate: the tightest limit is shared out equally, then the next.
void World::set_rates() {
  std::vector<Flight*> flows;
  for (const OpRef& op : flights)
    if (op->flight->phase == FlightPhase::flowing) flows.push_back(op->flight.get());
  if (flows.empty()) return;
  std::vector<FlowLimit> limits;
  const auto limit = [&](double rate, auto uses) {
    FlowLimit f{rate, {}};
    for (Flight* x : flows)
      if (uses(*x)) f.flows.push_back(x);
    if (!f.flows.empty()) limits.push_back(std::move(f));
  };
  for (int i = 0; i < machine.devices; i++) {
    const ar_emulated_device& s = devices[static_cast<size_t>(i)].spec;
    bool up = false, down = false;
    for (Flight* x : flows) {
      up |= x->up_device == i;
      down |= x->down_device == i;
    }
    const bool both = up && down;
    limit(to_rate(both ? std::min(s.d2h_gbs, s.duplex_gbs) : s.d2h_gbs), [i](Flight& x) { return x.up_device == i; });
    limit(to_rate(both ? std::min(s.h2d_gbs, s.duplex_gbs) : s.h2d_gbs), [i](Flight& x) { return x.down_device == i; });
  }
  for (int u = 0; u < AR_EMULATED_MAX_DEVICES; u++) {
    if (machine.uplink_gbs[u] <= 0) continue;
    const auto hangs = [&](int device) { return device >= 0 && machine.device[device].uplink == u; };
    limit(to_rate(machine.uplink_gbs[u]), [&](Flight& x) { return hangs(x.up_device); });
    limit(to_rate(machine.uplink_gbs[u]), [&](Flight& x) { return hangs(x.down_device); });
  }
  limit(to_rate(machine.host_gbs), [](Flight& x) { return x.up_device >= 0 || x.down_device >= 0; });
  for (Flight* f : flows)
    if (f->own_limit > 0) limit(f->own_limit, [f](Flight& x) { return &x == f; });
  while (!limits.empty()) {
    size_t tightest = 0;
    const auto share = [&](const FlowLimit& f) { return f.left / static_cast<double>(f.flows.size()); };
    for (size_t i = 1; i < limits.size(); i++)
      if (share(limits[i]) < share(limits[tightest])) tightest = i;
    const double rate = std::max(share(limits[tightest]), 1e-3);
    const std::vector<Flight*> settled = limits[tightest].flows;
    for (Flight* f : settled) {
      f->rate = rate;
      for (FlowLimit& m : limits) {
        auto it = std::find(m.flows.begin(), m.flows.end(), f);
        if (it == m.flows.end()) continue;
        m.flows.erase(it);
        m.left -= rate;
      }
    }
    limits.erase(std::remove_if(limits.begin(), limits.end(), [](const FlowLimit& f) { return f.flows.empty(); }),
                 limits.end());
  }
}

// Lets the bytes flow until `at`.
void World::flow_to(double at) {
  for (const OpRef& op : flights) {
    Flight& f = *op->flight;
    if (f.phase == FlightPhase::flowing) f.left = std::max(0.0, f.left - f.rate * (at - flow_us));
  }
  flow_us = at;
}

// What a copy or fill would take with the machine to itself: the time the seeded schedules book.
double World::alone_us(const Op& op) const {
  const Flight& f = *op.flight;
  if (f.phase == FlightPhase::timed) return f.next_us - op.start_us;
  double gbs = f.own_limit > 0 ? f.own_limit / 1e3 : machine.host_gbs;
  if (f.up_device >= 0) gbs = std::min(gbs, devices[static_cast<size_t>(f.up_device)].spec.d2h_gbs);
  if (f.down_device >= 0) gbs = std::min(gbs, devices[static_cast<size_t>(f.down_device)].spec.h2d_gbs);
  return machine.copy_us + static_cast<double>(op.work->bytes) / to_rate(gbs);
}

}  // namespace AR_NS
