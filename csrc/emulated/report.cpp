// Reports for people: who waits for what when nothing can run, and misuse.
#include <cstdio>

#include "world.h"

namespace AR_NS {

const char* order_name(Order o) {
  static const char* const names[] = {"no primitive",
#define AR_ORDER_NAME(name, text) #name,
                                      AR_ORDER_LIST(AR_ORDER_NAME)
#undef AR_ORDER_NAME
  };
  const int i = static_cast<int>(o);
  return i >= 0 && i < static_cast<int>(Order::count) ? names[i] : "no primitive";
}

static std::string hex(uint64_t v) {
  char text[24];
  std::snprintf(text, sizeof(text), "%llx", static_cast<unsigned long long>(v));
  return text;
}

std::string World::op_text(const Op& op) const {
  return std::string(op.work->kind == WorkKind::kernel ? "kernel " : "") + op.work->name + " (op " +
         std::to_string(op.id) + ", device " + std::to_string(op.device) + ", stream " +
         (op.stream == 0 ? std::string("default") : "0x" + hex(op.stream)) + ")";
}

std::string World::seen_text(const Seen& s) const {
  std::string text = s.block == -1 ? std::string(s.name) : std::string("kernel ") + s.name;
  text += " (op " + std::to_string(s.op) + ", device " + std::to_string(s.device) + ", stream " +
          (s.stream == 0 ? std::string("default") : "0x" + hex(s.stream));
  if (s.block >= 0) text += ", block " + std::to_string(s.block);
  return text + ")";
}

void World::misuse(const std::string& text) {
  if (hazards > 0) return;  // the first hazard stays
  report = "misuse at " + std::to_string(now_us) + " us, seed " + std::to_string(machine.seed) + ": " + text + "\n";
}

// Blocks that wait while blocks of a started kernel find no room beside them. Their deadlines then run as usual.
void World::report_residency() {
  if (reported_residency) return;
  std::string text;
  for (size_t i = 0; i < devices.size(); i++) {
    const Device& d = devices[i];
    if (d.admitting.empty()) continue;
    text += "device " + std::to_string(i) + ": all " + std::to_string(d.resident) + " resident blocks (limit " +
            std::to_string(d.spec.resident_blocks) + ") wait, and no room is left for";
    for (const OpRef& op : d.admitting)
      text += " " + std::to_string(op->kernel->order.size()) + " blocks of " + op_text(*op) + ";";
    text += "\n";
  }
  if (text.empty()) return;
  reported_residency = true;
  if (hazards > 0) return;
  report = "blocks wait for others that cannot become resident, at " + std::to_string(now_us) + " us, seed " +
           std::to_string(machine.seed) + "\n" + text;
  report += waiters_text();
}

std::string World::waiters_text() const {
  std::string text;
  for (const auto& b : blocks) {
    if (b->state != BlockState::spinning) continue;
    text += op_text(*b->op) + ", block " + std::to_string(b->block.core.index) + " waits in " + order_name(b->order) +
            " for " + describe(b->address) + " since " + std::to_string(b->wait_us) + " us" +
            (b->limit.timeout_ns == UINT64_MAX ? ", without a deadline" : "") + "\n";
  }
  for (const Device& d : devices)
    for (const auto& u : d.unfinished) {
      const Op& op = *u.second;
      if (op.state == OpState::running) continue;
      text += op_text(op) + " waits";
      const char* before = " for ";
      for (const OpRef& n : op.needs) {
        if (n->state == OpState::done) continue;
        text += before + op_text(*n);
        before = " and ";
      }
      if (op.state == OpState::ready) text += " for its copy engine";
      text += "\n";
    }
  return text;
}

void World::report_deadlock() {
  if (hazards > 0) return;
  report =
      "deadlock at " + std::to_string(now_us) + " us, seed " + std::to_string(machine.seed) + "\n" + waiters_text();
}

}  // namespace AR_NS
