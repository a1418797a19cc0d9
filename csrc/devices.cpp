// Devices, memory, streams, events and captures for programs without bindings of their own (allreduce.h, "devices"), and
// this backend's table of entry points. Included by all_*.cpp.
#include "comm.h"

namespace AR_NS {

namespace {

void* pointer(uint64_t v) { return reinterpret_cast<void*>(static_cast<uintptr_t>(v)); }
template <class H>
H handle(uint64_t v) {
  return reinterpret_cast<H>(static_cast<uintptr_t>(v));
}
uint64_t number(const void* p) { return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p)); }

int32_t failed(Code c, int device, const char* what, ar_error* e) {
  const Where where{-1, device, c};
  const int32_t status = code_is_memory(c)     ? AR_ERR_ALLOC
                         : code_is_argument(c) ? AR_ERR_ARGUMENT
                         : code_is_lost(c)     ? AR_ERR_DEVICE_LOST
                         : code_is_deadlock(c) ? AR_ERR_DEADLOCK
                         : code_is_hazard(c)   ? AR_ERR_HAZARD
                                               : AR_ERR_RUNTIME;
  return fail(e, status, where, "%s: %s", what, code_text(c));
}

// Checks the device, makes it current, runs f and puts the old one back.
template <class F>
int32_t on_device(int32_t device, const char* what, ar_error* e, F f) {
  int count = 0;
  Code c = device_count(&count);
  if (c != kOk) return failed(c, device, "counting devices", e);
  if (device < 0 || device >= count)
    return fail(e, AR_ERR_NO_DEVICE, {-1, device, 0}, "%s: there is no device %d, there are %d", what, device, count);
  DeviceGuard guard;
  c = set_device(device);
  if (c == kOk) c = f();
  return c == kOk ? AR_OK : failed(c, device, what, e);
}

int32_t bad_bytes(const char* what, int64_t bytes, ar_error* e) {
  return fail(e, AR_ERR_ARGUMENT, {}, "%s: %lld bytes", what, static_cast<long long>(bytes));
}

}  // namespace

int32_t device_count_api(int32_t* n, ar_error* e) {
  int count = 0;
  const Code c = device_count(&count);
  *n = count;
  return c == kOk ? AR_OK : failed(c, -1, "counting devices", e);
}
int32_t device_get_info(int32_t d, ar_device_info* out, ar_error* e) {
  std::memset(out, 0, sizeof(*out));
  return on_device(d, "looking at a device", e, [&]() -> Code {
    DeviceInfo i{};
    const Code c = device_info(d, &i);
    std::snprintf(out->name, sizeof(out->name), "%s", i.name);
    std::snprintf(out->uuid, sizeof(out->uuid), "%s", i.uuid);
    std::snprintf(out->bus_id, sizeof(out->bus_id), "%s", i.bus_id);
    out->cc_major = i.cc_major;
    out->cc_minor = i.cc_minor;
    out->sms = i.sms;
    out->copy_engines = i.copy_engines;
    out->memory_bytes = i.memory_bytes;
    out->simulated = kSimulated;
    return c;
  });
}
int32_t device_can_access_peer(int32_t d, int32_t peer, int32_t* can, ar_error* e) {
  return on_device(d, "asking for peer access", e, [&] {
    int yes = 0;
    const Code c = can_access_peer(&yes, d, peer);
    *can = yes;
    return c;
  });
}
int32_t device_malloc(int32_t d, int64_t bytes, ar_ptr* out, ar_error* e) {
  *out = 0;
  if (bytes <= 0) return bad_bytes("allocating device memory", bytes, e);
  return on_device(d, "allocating device memory", e, [&] {
    void* p = nullptr;
    const Code c = malloc_device(&p, static_cast<size_t>(bytes));
    *out = number(p);
    return c;
  });
}
int32_t device_free(int32_t d, ar_ptr p, ar_error* e) {
  return on_device(d, "freeing device memory", e, [&] { return free_device(pointer(p)); });
}
int32_t host_malloc(int64_t bytes, ar_ptr* out, ar_error* e) {
  *out = 0;
  if (bytes <= 0) return bad_bytes("allocating pinned memory", bytes, e);
  void* p = nullptr;
  const Code c = malloc_pinned(&p, static_cast<size_t>(bytes));
  *out = number(p);
  return c == kOk ? AR_OK : failed(c, -1, "allocating pinned memory", e);
}
int32_t host_free(ar_ptr p, ar_error* e) {
  const Code c = free_pinned(pointer(p));
  return c == kOk ? AR_OK : failed(c, -1, "freeing pinned memory", e);
}
int32_t copy_to_device(int32_t d, ar_ptr to, const void* from, int64_t n, ar_error* e) {
  if (n < 0) return bad_bytes("copying to the device", n, e);
  return on_device(d, "copying to the device", e,
                   [&] { return copy_blocking(pointer(to), from, static_cast<size_t>(n), CopyKind::host_to_device); });
}
int32_t copy_to_host(int32_t d, void* to, ar_ptr from, int64_t n, ar_error* e) {
  if (n < 0) return bad_bytes("copying to the host", n, e);
  return on_device(d, "copying to the host", e,
                   [&] { return copy_blocking(to, pointer(from), static_cast<size_t>(n), CopyKind::device_to_host); });
}
int32_t copy_async_api(int32_t d, ar_ptr to, ar_ptr from, int64_t n, ar_stream s, ar_error* e) {
  if (n < 0) return bad_bytes("copying on the device", n, e);
  return on_device(d, "copying on the device", e, [&] {
    return copy_async(pointer(to), pointer(from), static_cast<size_t>(n), CopyKind::device_to_device,
                      handle<Stream>(s));
  });
}
int32_t fill_async_api(int32_t d, ar_ptr to, int32_t v, int64_t n, ar_stream s, ar_error* e) {
  if (n < 0) return bad_bytes("filling", n, e);
  return on_device(d, "filling", e,
                   [&] { return fill_async(pointer(to), v, static_cast<size_t>(n), handle<Stream>(s)); });
}
int32_t stream_create_api(int32_t d, ar_stream* out, ar_error* e) {
  *out = 0;
  return on_device(d, "making a stream", e, [&] {
    Stream s = nullptr;
    const Code c = stream_create(&s);
    *out = number(s);
    return c;
  });
}
int32_t stream_destroy_api(int32_t d, ar_stream s, ar_error* e) {
  return on_device(d, "destroying a stream", e, [&] { return stream_destroy(handle<Stream>(s)); });
}
int32_t stream_synchronize_api(int32_t d, ar_stream s, ar_error* e) {
  return on_device(d, "waiting for a stream", e, [&] { return stream_synchronize(handle<Stream>(s)); });
}
int32_t stream_query_api(int32_t d, ar_stream s, ar_error* e) {
  bool done = false;
  const int32_t status = on_device(d, "asking a stream", e, [&] { return stream_query(handle<Stream>(s), &done); });
  if (status != AR_OK || done) return status;
  return fail(e, AR_ERR_PENDING, {-1, d, 0}, "the stream has work left");
}
int32_t device_synchronize_api(int32_t d, ar_error* e) {
  return on_device(d, "waiting for a device", e, [&] { return device_synchronize(); });
}
int32_t event_create_api(int32_t d, ar_event* out, ar_error* e) {
  *out = 0;
  return on_device(d, "making an event", e, [&] {
    Event ev = nullptr;
    const Code c = event_create(&ev, true);
    *out = number(ev);
    return c;
  });
}
int32_t event_destroy_api(int32_t d, ar_event ev, ar_error* e) {
  return on_device(d, "destroying an event", e, [&] { return event_destroy(handle<Event>(ev)); });
}
int32_t event_record_api(int32_t d, ar_event ev, ar_stream s, ar_error* e) {
  return on_device(d, "recording an event", e, [&] { return event_record(handle<Event>(ev), handle<Stream>(s)); });
}
int32_t event_wait_api(int32_t d, ar_event ev, ar_stream s, ar_error* e) {
  return on_device(d, "making a stream wait", e, [&] { return stream_wait(handle<Stream>(s), handle<Event>(ev)); });
}
int32_t event_synchronize_api(int32_t d, ar_event ev, ar_error* e) {
  return on_device(d, "waiting for an event", e, [&] { return event_synchronize(handle<Event>(ev)); });
}
int32_t event_elapsed_us_api(int32_t d, ar_event a, ar_event z, double* us, ar_error* e) {
  *us = 0;
  return on_device(d, "timing events", e, [&] { return event_elapsed_us(us, handle<Event>(a), handle<Event>(z)); });
}
int32_t trace_start_api(const int32_t* devices, int32_t n, ar_error* e) {
  int count = 0;
  Code c = device_count(&count);
  if (c != kOk) return failed(c, -1, "counting devices", e);
  for (int32_t i = 0; i < n; i++)
    if (devices[i] < 0 || devices[i] >= count)
      return fail(e, AR_ERR_NO_DEVICE, {-1, devices[i], 0}, "tracing: there is no device %d, there are %d", devices[i],
                  count);
  c = trace_start(std::vector<int>(devices, devices + n));
  return c == kOk ? AR_OK : failed(c, -1, "starting a trace", e);
}
int32_t trace_stop_api(ar_error*) {
  trace_stop();
  return AR_OK;
}
int32_t trace_read_api(ar_trace_record* out, int64_t n, int64_t* have, ar_error* e) {
  std::vector<ar_trace_record> all;
  const Code c = trace_read(&all);
  *have = static_cast<int64_t>(all.size());
  for (int64_t i = 0; i < n && i < *have; i++) out[i] = all[static_cast<size_t>(i)];
  return c == kOk ? AR_OK : failed(c, -1, "reading a trace", e);
}
int32_t capture_begin_api(int32_t d, ar_stream s, ar_error* e) {
  return on_device(d, "beginning a capture", e, [&] { return capture_begin(handle<Stream>(s)); });
}
int32_t capture_end_api(int32_t d, ar_stream s, ar_graph* out, ar_error* e) {
  *out = 0;
  return on_device(d, "ending a capture", e, [&] {
    Graph g = nullptr;
    GraphExec x = nullptr;
    Code c = capture_end(handle<Stream>(s), &g);
    if (c == kOk) {
      c = graph_instantiate(&x, g);
      graph_destroy(g);
    }
    *out = number(x);
    return c;
  });
}
int32_t graph_launch_api(int32_t d, ar_graph g, ar_stream s, ar_error* e) {
  return on_device(d, "launching a graph", e, [&] { return graph_launch(handle<GraphExec>(g), handle<Stream>(s)); });
}
int32_t graph_destroy_api(int32_t d, ar_graph g, ar_error* e) {
  return on_device(d, "destroying a graph", e, [&] { return graph_exec_destroy(handle<GraphExec>(g)); });
}

// bench.cpp
int32_t copy_kind_async(int32_t d, ar_ptr to, ar_ptr from, int64_t n, int32_t kind, ar_stream s, ar_error* e);
int32_t bench_load(int32_t d, int32_t blocks, int64_t rounds, ar_stream s, ar_error* e);
int32_t bench_compare(int32_t d, const ar_bench_rows* rows, ar_ptr wrong, ar_stream s, ar_error* e);
// probe.cpp
int32_t probe_pair(int32_t d, int32_t peer, int32_t timeout_ms, ar_probe_result* out, ar_error* e);

const ar::Backend* backend() {
  static const ar::Backend table = {
      kBackend, runtime_version(), [](const ar_options* o) { return shared_bytes(*o); },
      // communicator
      comm_create, comm_has_path, allreduce, comm_prepare, comm_wait, comm_error, comm_stats, comm_close, comm_lose,
      comm_export_peer, comm_import_peers, comm_check_peers, comm_nccl_windows, comm_free, nccl_id,
      // devices and memory
      device_count_api, device_get_info, device_can_access_peer, device_malloc, device_free, host_malloc, host_free,
      copy_to_device, copy_to_host, copy_async_api, fill_async_api,
      // streams, events, graphs
      stream_create_api, stream_destroy_api, stream_synchronize_api, stream_query_api, device_synchronize_api,
      event_create_api, event_destroy_api, event_record_api, event_wait_api, event_synchronize_api,
      event_elapsed_us_api, trace_start_api, trace_stop_api, trace_read_api, capture_begin_api, capture_end_api,
      graph_launch_api, graph_destroy_api,
      // benchmarks
      copy_kind_async, bench_load, bench_compare,
      // probe
      probe_pair};
  return &table;
}

}  // namespace AR_NS
