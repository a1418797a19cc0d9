// Stream capture and graphs. While a stream is captured its ops become nodes; what it would wait for is its frontier,
// the nodes that its next node follows. A launch turns the nodes into ops.
#include <algorithm>

#include "world.h"

namespace AR_NS {

static void extend(std::vector<int>& frontier, const std::vector<int>& more) {
  for (int n : more)
    if (std::find(frontier.begin(), frontier.end(), n) == frontier.end()) frontier.push_back(n);
}

void World::invalidate(Capture& c) { c.active = false; }

Code World::capture_op(StreamState& s, WorkRef work) {
  Capture& c = *s.capture;
  if (!c.active) return kCaptureInvalidated;
  c.body->nodes.push_back({std::move(work), s.device, s.handle, s.frontier});
  s.frontier.assign(1, static_cast<int>(c.body->nodes.size()) - 1);
  return kOk;
}

Code World::capture_wait(StreamState& s, EventState& e) {
  if (s.capture != nullptr && !s.capture->active) return kCaptureInvalidated;
  if (e.capture == nullptr) {  // s is captured, the event is not
    if (e.op == nullptr) return kOk;
    invalidate(*s.capture);
    return kCaptureIsolation;
  }
  if (!e.capture->active || e.capture->ended) {
    if (s.capture != nullptr) invalidate(*s.capture);
    return e.capture->ended ? kInvalidValue : kCaptureInvalidated;
  }
  if (s.capture == nullptr) {
    if (s.handle == 0) {
      invalidate(*e.capture);
      return kCaptureImplicit;
    }
    s.capture = e.capture;
    s.frontier = e.frontier;
    return kOk;
  }
  if (s.capture != e.capture) {
    invalidate(*s.capture);
    invalidate(*e.capture);
    return kCaptureMerge;
  }
  extend(s.frontier, e.frontier);
  return kOk;
}

void World::leave_capture(const CaptureRef& c) {
  c->ended = true;
  for (auto& s : streams)
    if (s.second.capture == c) {
      s.second.capture = nullptr;
      s.second.frontier.clear();
    }
}

std::shared_ptr<UserObject> World::keep(void* arg, void (*drop)(void*)) {
  return std::shared_ptr<UserObject>(new UserObject{arg, drop}, [this](UserObject* o) {
    dropped.push_back(*o);
    delete o;
  });
}

// Whether every node lies before the frontier.
static bool all_reach(const GraphBody& body, const std::vector<int>& frontier) {
  std::vector<char> seen(body.nodes.size(), 0);
  std::vector<int> todo = frontier;
  size_t count = 0;
  while (!todo.empty()) {
    const size_t n = static_cast<size_t>(todo.back());
    todo.pop_back();
    if (seen[n]) continue;
    seen[n] = 1;
    count++;
    todo.insert(todo.end(), body.nodes[n].needs.begin(), body.nodes[n].needs.end());
  }
  return count == body.nodes.size();
}

// ---- entry points -----------------------------------------------------------------------------------------------

Code capture_info(Stream s, CaptureInfo* out) {
  Guard g;
  *out = CaptureInfo();
  StreamState* st = g.w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (st->capture == nullptr) return kOk;
  out->state = st->capture->active ? Capturing::active : Capturing::invalidated;
  if (!st->capture->active) return kOk;
  out->id = st->capture->id;
  out->graph = as_handle<Graph>(st->capture->graph);
  return kOk;
}

Code capture_begin(Stream s) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_GRAPH)) return kInjectedFault;
  StreamState* st = w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  if (st->handle == 0) return kCaptureUnsupported;
  if (st->capture != nullptr) return kIllegalState;
  auto c = std::make_shared<Capture>();
  c->id = w.new_handle();
  c->graph = w.new_handle();
  c->origin = st->handle;
  c->body = std::make_shared<GraphBody>();
  w.graphs[c->graph].body = c->body;
  st->capture = c;
  st->frontier.clear();
  return kOk;
}

Code capture_end(Stream s, Graph* out) {
  Guard g;
  World& w = g.w;
  *out = nullptr;
  StreamState* st = w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  CaptureRef c = st->capture;
  if (c == nullptr) return kIllegalState;
  if (c->origin != st->handle) {
    w.invalidate(*c);
    return kCaptureUnmatched;
  }
  Code code = kOk;
  if (!c->active) {
    code = kCaptureInvalidated;
  } else if (!all_reach(*c->body, st->frontier)) {
    code = kCaptureUnjoined;
  }
  w.leave_capture(c);
  if (code != kOk) {
    c->active = false;
    w.graphs.erase(c->graph);
    return code;
  }
  *out = as_handle<Graph>(c->graph);
  return kOk;
}

Code graph_retain(const CaptureInfo& info, void* arg, void (*drop)(void*)) {
  Guard g;
  if (g.w.injected(AR_CALL_GRAPH)) return kInjectedFault;
  auto it = g.w.graphs.find(handle_value(info.graph));
  if (it == g.w.graphs.end() || drop == nullptr) return kInvalidValue;
  it->second.keeps.push_back(g.w.keep(arg, drop));
  return kOk;
}

Code graph_instantiate(GraphExec* x, Graph graph) {
  Guard g;
  *x = nullptr;
  if (g.w.injected(AR_CALL_GRAPH)) return kInjectedFault;
  auto it = g.w.graphs.find(handle_value(graph));
  if (it == g.w.graphs.end()) return kInvalidValue;
  const uint64_t handle = g.w.new_handle();
  GraphExecState& exec = g.w.execs[handle];
  exec = {it->second.body, it->second.keeps, nullptr, {}};
  std::map<uint64_t, Timeline> lines;  // one for each captured stream: its nodes follow each other
  for (const GraphNode& n : exec.body->nodes) {
    const auto [at, fresh] = lines.emplace(n.stream, -1);
    if (fresh) at->second = g.w.new_line();
    exec.lines.push_back(at->second);
  }
  *x = as_handle<GraphExec>(handle);
  return kOk;
}

static WorkRef graph_marker() {
  static const WorkRef m = [] {
    auto work = std::make_shared<Work>();
    work->name = "graph launch";
    return work;
  }();
  return m;
}

Code graph_launch(GraphExec x, Stream s) {
  Guard g;
  World& w = g.w;
  if (w.injected(AR_CALL_GRAPH)) return kInjectedFault;
  auto it = w.execs.find(handle_value(x));
  if (it == w.execs.end()) return kInvalidValue;
  StreamState* st = w.stream(s);
  if (st == nullptr) return kInvalidHandle;
  GraphExecState& exec = it->second;
  const auto& nodes = exec.body->nodes;
  if (st->capture != nullptr) {
    w.invalidate(*st->capture);
    return kCaptureUnsupported;
  }
  // Launches of one executable follow each other, whatever their streams.
  const Timeline line = w.line_of_stream(*st);
  OpRef begin = w.make_op(graph_marker(), st->device, st->handle, line);
  w.need(begin, st->tail, 0);
  w.need(begin, exec.last, 0);
  std::vector<OpRef> ops;
  std::vector<char> followed(nodes.size(), 0);
  for (const GraphNode& n : nodes) {
    OpRef op = w.make_op(n.work, n.device, n.stream, exec.lines[ops.size()]);
    for (int k : n.needs) {
      const OpRef& before = ops[static_cast<size_t>(k)];
      followed[static_cast<size_t>(k)] = 1;
      w.need(op, before, before->device != op->device ? w.machine.hop_us : 0);
    }
    if (n.needs.empty()) w.need(op, begin, 0);
    ops.push_back(op);
  }
  OpRef end = w.make_op(graph_marker(), st->device, st->handle, line);
  w.need(end, begin, 0);
  for (size_t i = 0; i < ops.size(); i++)
    if (!followed[i]) w.need(end, ops[i], 0);
  end->keeps = exec.keeps;
  exec.last = end;
  st->tail = end;
  w.submit(begin);
  for (const OpRef& op : ops) w.submit(op);
  w.submit(end);
  return kOk;
}

Code graph_destroy(Graph graph) {
  Guard g;
  return g.w.graphs.erase(handle_value(graph)) == 1 ? kOk : kInvalidValue;
}

Code graph_exec_destroy(GraphExec x) {
  Guard g;
  auto it = g.w.execs.find(handle_value(x));
  if (it == g.w.execs.end()) return kInvalidValue;
  Timeline last = -1;
  std::vector<Timeline> lines = it->second.lines;
  std::sort(lines.begin(), lines.end());
  for (Timeline l : lines)
    if (l != std::exchange(last, l)) g.w.give_line(l, it->second.last);
  g.w.execs.erase(it);
  return kOk;
}

}  // namespace AR_NS
