// Streams and events. A stream is its newest op; an event is the record that was current when it was asked for.
#include "world.h"

namespace AR_NS {

static WorkRef marker(const char* name) {
  auto work = std::make_shared<Work>();
  work->name = name;
  return work;
}
static WorkRef record_marker() {
  static const WorkRef m = marker("event record");
  return m;
}
static WorkRef wait_marker() {
  static const WorkRef m = marker("event wait");
  return m;
}

Code stream_create(Stream* s) {
  Guard g;
  *s = nullptr;
  if (g.w.injected(AR_CALL_STREAM_CREATE)) return kInjectedFault;
  const uint64_t handle = g.w.new_handle();
  StreamState& st = g.w.streams[handle];
  st.handle = handle;
  st.device = current_device(g.w);
  *s = as_handle<Stream>(handle);
  return kOk;
}

// Work already enqueued still runs. A capture that began here is lost; one that was forked here is left unjoined.
Code stream_destroy(Stream s) {
  Guard g;
  auto it = g.w.streams.find(handle_value(s));
  if (it == g.w.streams.end()) return kInvalidHandle;
  CaptureRef c = it->second.capture;
  if (c != nullptr && c->origin == it->first) {
    g.w.leave_capture(c);
    g.w.graphs.erase(c->graph);
  }
  if (g.w.machine.lifetimes != 0 && !g.w.host_knows(it->second.tail))
    g.w.hazard(it->second.device, "a stream was destroyed while it may be in use: the host did not wait for " +
                                      g.w.op_text(*it->second.tail));
  if (it->second.line >= 0) g.w.give_line(it->second.line, it->second.tail);
  g.w.streams.erase(it);
  return kOk;
}

// Asking about a stream that is being captured is an error that also ends the capture's validity.
static Code refuse_capturing(World& w, StreamState& s) {
  if (s.capture == nullptr) return kOk;
  w.invalidate(*s.capture);
  return kCaptureUnsupported;
}

static bool is_done(const OpRef& op) { return op == nullptr || op->state == OpState::done; }

uint64_t stream_identity(Stream s) {
  Guard g;
  StreamState* st = g.w.stream(s);
  if (st == nullptr || s == nullptr || refuse_capturing(g.w, *st) != kOk) return 0;
  return handle_value(s);  // handles are never used twice
}

Code stream_query(Stream s, bool* done) {
  Guard g;
  World& w = g.w;
  *done = false;
  StreamState* st = w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (Code c = refuse_capturing(w, *st)) return c;
  const int device = st->device;
  const OpRef op = st->tail;
  *done = w.query(g.l, [&] { return is_done(op); });
  if (*done) w.tell_host(op);
  return w.devices[static_cast<size_t>(device)].lost;
}

Code stream_synchronize(Stream s) {
  Guard g;
  World& w = g.w;
  StreamState* st = w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (Code c = refuse_capturing(w, *st)) return c;
  const int device = st->device;
  const OpRef op = st->tail;
  if (Code c = w.wait(g.l, [&] { return is_done(op); })) return c;
  w.tell_host(op);
  return w.devices[static_cast<size_t>(device)].lost;
}

Code device_synchronize() {
  Guard g;
  World& w = g.w;
  const int device = current_device(w);
  Code refused = kOk;
  for (auto& s : w.streams)
    if (s.second.device == device && s.second.capture != nullptr)
      if (Code c = refuse_capturing(w, s.second)) refused = c;
  if (refused != kOk) return refused;
  const uint64_t last = w.next_op;
  if (Code c = w.wait(g.l, [&w, device, last] {
        const auto& u = w.devices[static_cast<size_t>(device)].unfinished;
        return u.empty() || u.begin()->first >= last;
      }))
    return c;
  w.host.join(w.devices[static_cast<size_t>(device)].done);
  tsan_acquire(&w.devices[static_cast<size_t>(device)].done);
  return w.devices[static_cast<size_t>(device)].lost;
}

Code event_create(Event* e, bool timing) {
  Guard g;
  *e = nullptr;
  if (g.w.injected(AR_CALL_EVENT_CREATE)) return kInjectedFault;
  const uint64_t handle = g.w.new_handle();
  EventState& ev = g.w.events[handle];
  ev.timing = timing;
  ev.device = current_device(g.w);
  *e = as_handle<Event>(handle);
  return kOk;
}

Code event_destroy(Event e) {
  Guard g;
  auto it = g.w.events.find(handle_value(e));
  if (it == g.w.events.end()) return kInvalidHandle;
  if (g.w.machine.lifetimes != 0 && !g.w.host_knows(it->second.op))
    g.w.hazard(it->second.device, "an event was destroyed while it may be in use: the host did not wait for " +
                                      g.w.op_text(*it->second.op));
  g.w.events.erase(it);
  return kOk;
}

Code event_record(Event e, Stream s) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_RECORD)) return kInjectedFault;
  EventState* ev = w.event(e);
  StreamState* st = w.stream(s);
  if (ev == nullptr || st == nullptr || ev->device != st->device) return kInvalidHandle;
  if (CaptureRef c = st->capture) {
    if (!c->active) return kCaptureInvalidated;
    ev->op = nullptr;
    ev->capture = c;
    ev->frontier = st->frontier;
    return kOk;
  }
  ev->capture = nullptr;
  ev->frontier.clear();
  return w.enqueue(*st, record_marker(), &ev->op);
}

// A captured event stands for no work that is scheduled: asking about it is an error, and one for its capture too.
// (Seen on driver 580: 907 during the capture, 1 once it has ended.)
static Code refuse_captured(World& w, EventState& e) {
  if (e.capture == nullptr) return kOk;
  if (e.capture->ended) return kInvalidValue;
  w.invalidate(*e.capture);
  return kCapturedEvent;
}

Code event_query(Event e, bool* done) {
  Guard g;
  World& w = g.w;
  *done = false;
  EventState* ev = w.event(e);
  if (ev == nullptr) return kInvalidHandle;
  if (Code c = refuse_captured(w, *ev)) return c;
  const int device = ev->device;
  const OpRef op = ev->op;
  *done = w.query(g.l, [&] { return is_done(op); });
  if (*done) w.tell_host(op);
  return w.devices[static_cast<size_t>(device)].lost;
}

Code event_synchronize(Event e) {
  Guard g;
  World& w = g.w;
  EventState* ev = w.event(e);
  if (ev == nullptr) return kInvalidHandle;
  if (Code c = refuse_captured(w, *ev)) return c;
  const int device = ev->device;
  const OpRef op = ev->op;
  if (Code c = w.wait(g.l, [&] { return is_done(op); })) return c;
  w.tell_host(op);
  return w.devices[static_cast<size_t>(device)].lost;
}

Code event_elapsed_us(double* us, Event a, Event b) {
  Guard g;
  *us = 0;
  EventState* x = g.w.event(a);
  EventState* y = g.w.event(b);
  if (x == nullptr || y == nullptr || !x->timing || !y->timing || x->device != y->device) return kInvalidHandle;
  if (Code c = refuse_captured(g.w, *x)) return c;
  if (Code c = refuse_captured(g.w, *y)) return c;
  if (x->op == nullptr || y->op == nullptr) return kInvalidHandle;
  if (!is_done(x->op) || !is_done(y->op)) return kNotReady;
  *us = y->op->end_us - x->op->end_us;
  return kOk;
}

Code stream_wait(Stream s, Event e) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_WAIT)) return kInjectedFault;
  EventState* ev = w.event(e);
  StreamState* st = w.stream(s);
  if (ev == nullptr || st == nullptr) return kInvalidHandle;
  if (st->capture != nullptr || ev->capture != nullptr) return w.capture_wait(*st, *ev);
  if (Device& d = w.devices[static_cast<size_t>(st->device)]; d.gone) return d.lost;
  if (ev->op == nullptr) return kOk;  // never recorded
  OpRef op = w.make_op(wait_marker(), st->device, st->handle, w.line_of_stream(*st));
  w.need(op, st->tail, 0);
  w.need(op, ev->op, ev->op->device != st->device ? w.machine.hop_us : 0);
  st->tail = op;
  w.submit(op);
  return kOk;
}

}  // namespace AR_NS
