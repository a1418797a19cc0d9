// The controls of allreduce_emulated.h.
#include <cstdio>

#include "world.h"

namespace AR_NS {

const char* order_name(Order o);

static int32_t refuse(ar_error* error, const std::string& text) {
  if (error != nullptr) {
    std::memset(error, 0, sizeof(*error));
    error->status = AR_ERR_ARGUMENT;
    error->rank = error->device = error->peer = -1;
    std::snprintf(error->message, sizeof(error->message), "%s", text.c_str());
  }
  return AR_ERR_ARGUMENT;
}

// "" if the machine is possible; zeros become defaults.
static std::string complete(ar_emulated_machine* m) {
  if (m->size != sizeof(ar_emulated_machine)) return "machine.size is not sizeof(ar_emulated_machine)";
  if (m->devices < 1 || m->devices > AR_EMULATED_MAX_DEVICES)
    return "machine.devices is " + std::to_string(m->devices) + "; 1.." + std::to_string(AR_EMULATED_MAX_DEVICES) +
           " are possible";
  if (m->drive != AR_DRIVE_BACKGROUND && m->drive != AR_DRIVE_STEPPED) return "machine.drive is no ar_emulated_drive";
  if (m->schedule < AR_SCHEDULE_FIFO || m->schedule > AR_SCHEDULE_SCRIPTED)
    return "machine.schedule is no ar_emulated_schedule";
  ar_emulated_machine d;
  ar_emulated_defaults(&d, m->devices);
  bool good = true;
  const auto rate = [&](double& v, double standard) {
    if (!(v >= 0) || v > 1e12) good = false;
    if (v == 0) v = standard;
  };
  const auto number = [&](int32_t& v, int32_t standard) {
    if (v < 0) good = false;
    if (v == 0) v = standard;
  };
  for (int i = 0; i < m->devices; i++) {
    ar_emulated_device& x = m->device[i];
    const ar_emulated_device& y = d.device[i];
    rate(x.h2d_gbs, y.h2d_gbs);
    rate(x.d2h_gbs, y.d2h_gbs);
    rate(x.duplex_gbs, y.duplex_gbs);
    rate(x.memory_gbs, y.memory_gbs);
    rate(x.kernel_host_gbs, y.kernel_host_gbs);
    number(x.sms, y.sms);
    number(x.resident_blocks, y.resident_blocks);
    if (x.cc_major == 0) x.cc_major = y.cc_major;
    if (x.memory_bytes < 0) good = false;
    if (x.memory_bytes == 0) x.memory_bytes = y.memory_bytes;
    if (x.uplink < -1 || x.uplink >= AR_EMULATED_MAX_DEVICES || (x.uplink >= 0 && !(m->uplink_gbs[x.uplink] > 0)))
      return "device " + std::to_string(i) + " hangs on uplink " + std::to_string(x.uplink) +
             ", which is out of range or has no rate";
  }
  rate(m->host_gbs, d.host_gbs);
  rate(m->peer_gbs, d.peer_gbs);
  rate(m->copy_us, d.copy_us);
  rate(m->launch_us, d.launch_us);
  rate(m->hop_us, d.hop_us);
  rate(m->flag_us, d.flag_us);
  return good ? "" : "a rate, time, count or size of the machine is negative or no number";
}

Code trace_start(const std::vector<int>& devices) {
  Guard g;
  g.w.traced = devices;
  g.w.trace.clear();
  return kOk;
}
// Operations are recorded when they end.
void trace_stop() {
  std::vector<int> devices;
  {
    Guard g;
    devices = g.w.traced;
  }
  int old = 0;
  get_device(&old);
  for (int d : devices)
    if (set_device(d) == kOk) device_synchronize();
  set_device(old);
  Guard g;
  g.w.traced.clear();
}
Code trace_read(std::vector<ar_trace_record>* out) {
  Guard g;
  *out = g.w.trace;
  return kOk;
}

}  // namespace AR_NS

extern "C" {

void ar_emulated_defaults(ar_emulated_machine* machine, int32_t n) { AR_NS::default_machine(machine, n); }

int32_t ar_emulated_configure(const ar_emulated_machine* machine, int32_t force, ar_error* error) {
  using namespace AR_NS;
  if (machine == nullptr) return refuse(error, "machine is NULL");
  ar_emulated_machine m = *machine;
  const std::string bad = complete(&m);
  if (!bad.empty()) return refuse(error, bad);
  Guard g;
  World& w = g.w;
  const size_t alive = w.live_objects();
  if (alive > 0 && force != 1)
    return refuse(error,
                  std::to_string(alive) + " allocations, streams, events or graphs of the emulated machine are alive");
  w.tear_down(g.l);
  w.build(m);
  w.host_cv.notify_all();
  if (error != nullptr) std::memset(error, 0, sizeof(*error));
  return AR_OK;
}

double ar_emulated_now_us(void) {
  AR_NS::Guard g;
  return g.w.now_us;
}

void ar_emulated_fail(int32_t call, int64_t nth) {
  AR_NS::Guard g;
  if (call >= 0 && call < AR_CALL_KINDS) g.w.fault[call] = nth > 0 ? nth : 0;
}

int64_t ar_emulated_fail_left(int32_t call) {
  AR_NS::Guard g;
  return call >= 0 && call < AR_CALL_KINDS ? g.w.fault[call] : 0;
}

void ar_emulated_drop_store(int32_t flag, int64_t nth) {
  AR_NS::Guard g;
  AR_NS::g_orders.drop[flag != 0].store(nth);
}

void ar_emulated_lose(int32_t device, int64_t after) {
  AR_NS::Guard g;
  if (device >= 0 && device < g.w.machine.devices) g.w.devices[static_cast<size_t>(device)].lose_after = after;
}

void ar_emulated_mutate(int32_t order_id) { AR_NS::g_orders.mutated.store(order_id); }

const char* ar_emulated_order_name(int32_t order_id) {
  if (order_id < 1 || order_id >= static_cast<int32_t>(ar::Order::count)) return nullptr;
  return AR_NS::order_name(static_cast<ar::Order>(order_id));
}

const char* ar_emulated_order_text(int32_t order_id) {
  static const char* const texts[] = {"",
#define AR_ORDER_TEXT(name, text) text,
                                      AR_ORDER_LIST(AR_ORDER_TEXT)
#undef AR_ORDER_TEXT
  };
  if (order_id < 1 || order_id >= static_cast<int32_t>(ar::Order::count)) return nullptr;
  return texts[order_id];
}

int64_t ar_emulated_order_count(int32_t order_id) {
  if (order_id < 1 || order_id >= static_cast<int32_t>(ar::Order::count)) return 0;
  return AR_NS::g_orders.passes[order_id].load();
}

const char* ar_emulated_report(void) {
  AR_NS::Guard g;
  static std::string shown;
  shown = g.w.report;
  return shown.c_str();
}

void ar_emulated_script(const int32_t* picks, int64_t n) {
  AR_NS::Guard g;
  g.w.script.assign(picks, picks + (picks != nullptr ? n : 0));
  g.w.choices.clear();
  g.w.scripted = 0;
}

int64_t ar_emulated_script_read(int32_t* choices, int64_t n) {
  AR_NS::Guard g;
  const int64_t have = static_cast<int64_t>(g.w.choices.size());
  for (int64_t i = 0; i < n && i < have; i++) choices[i] = g.w.choices[static_cast<size_t>(i)];
  return have;
}

int64_t ar_emulated_hazards(void) {
  AR_NS::Guard g;
  return g.w.hazards;
}

int64_t ar_emulated_live_objects(void) {
  AR_NS::Guard g;
  return static_cast<int64_t>(g.w.live_objects());
}

}  // extern "C"

namespace AR_NS {
bool drive_is_stepped() {
  Guard g;
  return g.w.stepped;
}
}  // namespace AR_NS
