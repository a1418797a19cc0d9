// Captured reductions over their whole life: many replays between eager calls and other graphs, a graph per device, captures
// that go wrong, replays after Close.
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

// 10^4 replays of each path's graph (an odd number of calls), among eager calls and the other graph.
TEST(Graphs, TenThousandReplaysOfEachPath) {
  constexpr int kReplays = 10000, kLook = 500;
  Rig r(Machine{}, 2, 1 << 20, 64 << 10, 4);
  const std::vector<std::vector<size_t>> calls = {
      {r.make_fed(AR_PATH_INTERNAL, AR_F32, 300, true), r.make_fed(AR_PATH_INTERNAL, AR_BF16, 70),
       r.make_fed(AR_PATH_INTERNAL, AR_F32, 9)},
      {r.make_fed(AR_PATH_COPY_ENGINE, AR_BF16, 700)},
  };
  const size_t eager[] = {r.make_fed(AR_PATH_INTERNAL, AR_F32, 500), r.make_fed(AR_PATH_COPY_ENGINE, AR_F32, 900)};
  std::vector<ar_graph> graphs;
  for (const auto& row : calls) {
    graphs.push_back(r.capture([&] {
      for (size_t i : row) r.enqueue(i);
    }));
    ASSERT_NE(graphs.back(), 0u) << r.e.message;
  }
  for (int k = 0; k < kReplays; k++)
    for (size_t g = 0; g < graphs.size(); g++) {
      const bool look = k % kLook == 0;
      if (look) {
        for (int q = 0; q < 2; q++)  // the replays before it read what is refilled
          ar_stream_synchronize(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &r.e);
        for (size_t i : calls[g]) r.refill(i);
      }
      r.launch(graphs[g]);
      if (k % 7 == 0) r.enqueue(eager[k / 7 % 2]);
      if (!look) continue;
      r.wait();
      for (size_t i : calls[g]) ASSERT_EQ(r.wrong(i), 0) << "replay " << k;
      ASSERT_EQ(r.wrong(eager[k / 7 % 2]), 0) << "eager call after replay " << k;
    }
  r.wait();
  for (const auto& row : calls)
    for (size_t i : row) ASSERT_EQ(r.wrong(i), 0);
  for (ar_graph g : graphs) ar_graph_destroy(rig::B, r.device(0), g, &r.e);
}

// The graph keeps the memory it captured; the abort word of the closed communicator ends what would wait for a peer.
TEST(Graphs, AReplayAfterCloseEnds) {
  for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE})
    for (int64_t count : {500, 100000}) {
      Rig r(Machine{}, 2, 1 << 20, 64 << 10, 2);
      const size_t i = r.make_fed(path, AR_BF16, count);
      const ar_graph graph = r.capture([&] { r.enqueue(i); });
      ASSERT_NE(graph, 0u) << r.e.message;
      r.launch(graph);
      EXPECT_EQ(r.wrong(i), 0);
      ASSERT_EQ(ar_comm_close(r.comm, &r.e), AR_OK);
      for (int k = 0; k < 3; k++) {
        r.launch(graph);
        for (int q = 0; q < 2; q++)
          ASSERT_EQ(ar_stream_synchronize(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &r.e), AR_OK)
              << r.e.message << "\n"
              << ar_emulated_report();
      }
      EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_ERR_CLOSED);
      EXPECT_EQ(r.call(i), AR_ERR_CLOSED);
      EXPECT_EQ(ar_graph_destroy(rig::B, r.device(0), graph, &r.e), AR_OK);
      r.renew();  // nothing is left
    }
}

std::vector<ar_graph> graph_per_device(Rig& r, size_t i, int32_t want = AR_OK) {
  std::vector<ar_graph> graphs(static_cast<size_t>(r.ranks()));
  for (int q = 0; q < r.ranks(); q++)
    rig::expect_ok(ar_capture_begin(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &r.e), r.e, "begin");
  EXPECT_EQ(ar_allreduce(r.comm, r.bufs(i).data(), r.ranks(), r.path(i), AR_F32, &r.e), want) << r.e.message;
  for (int q = 0; q < r.ranks(); q++)
    rig::expect_ok(
        ar_capture_end(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &graphs[static_cast<size_t>(q)], &r.e),
        r.e, "end");
  return graphs;
}

TEST(Graphs, OnePerDevice) {
  if (rig::B == AR_BACKEND_CUDA && rig::device_count() < 2) GTEST_SKIP() << "two GPUs are needed";
  for (int64_t count : {500, 60000}) {
    Rig r(Machine{}, 2, 1 << 20, 64 << 10, 2);
    Case c;
    c.count = count;
    const size_t i = r.make(c);
    const std::vector<ar_graph> graphs = graph_per_device(r, i);
    for (int k = 0; k < 20; k++) {
      r.refill(i);
      for (int q = 0; q < 2; q++)  // either may be launched first
        rig::expect_ok(ar_graph_launch(rig::B, r.device((q + k) % 2), graphs[static_cast<size_t>((q + k) % 2)],
                                       r.streams[static_cast<size_t>((q + k) % 2)], &r.e),
                       r.e, "launch");
      ASSERT_EQ(r.wrong(i), 0) << "replay " << k;
    }
    for (int q = 0; q < 2; q++) ar_graph_destroy(rig::B, r.device(q), graphs[static_cast<size_t>(q)], &r.e);
  }
  Rig r(Machine{}, 2);
  Case c;
  c.path = AR_PATH_COPY_ENGINE;
  c.count = 1000;
  for (ar_graph g : graph_per_device(r, r.make(c), AR_ERR_NOT_CAPTURABLE)) ar_graph_destroy(rig::B, 0, g, &r.e);
}

TEST(Graphs, ARankThatNeverCalls) {
  if (rig::B == AR_BACKEND_CUDA && rig::device_count() < 2) GTEST_SKIP() << "two GPUs are needed";
  Rig r(Machine{}, 2, 1 << 20, 64 << 10, 2, 200);
  Case c;
  c.count = 500;
  const size_t i = r.make(c);
  const std::vector<ar_graph> graphs = graph_per_device(r, i);
  rig::expect_ok(ar_graph_launch(rig::B, r.device(0), graphs[0], r.streams[0], &r.e), r.e, "launch");
  ASSERT_EQ(ar_stream_synchronize(rig::B, r.device(0), r.streams[0], &r.e), AR_OK) << r.e.message;
  ASSERT_EQ(ar_comm_error(r.comm, &r.e), AR_ERR_TIMEOUT) << r.e.message;
  EXPECT_EQ(r.e.rank, 0);
  EXPECT_EQ(r.e.peer, 1);
  EXPECT_EQ(std::string(r.e.phase), "internal data");
  EXPECT_EQ(r.call(i), AR_ERR_TIMEOUT);
  for (int q = 0; q < 2; q++) ar_graph_destroy(rig::B, r.device(q), graphs[static_cast<size_t>(q)], &r.e);
  r.renew();
  r.enqueue(i);
  r.wait();
  EXPECT_EQ(r.wrong(i), 0);
}

// The host stalls between the launches, for less than the deadline.
TEST(Graphs, AHostThatStalls) {
  if (rig::B == AR_BACKEND_CUDA && rig::device_count() < 2) GTEST_SKIP() << "two GPUs are needed";
  Machine m;
  m.drive = AR_DRIVE_BACKGROUND;  // deadlines in real time
  Rig r(m, 2, 1 << 20, 64 << 10, 2, 2000);
  Case c;
  c.count = 500;
  const size_t i = r.make(c);
  const std::vector<ar_graph> graphs = graph_per_device(r, i);
  for (int q = 0; q < 2; q++) {
    rig::expect_ok(
        ar_graph_launch(rig::B, r.device(q), graphs[static_cast<size_t>(q)], r.streams[static_cast<size_t>(q)], &r.e),
        r.e, "launch");
    if (q == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  EXPECT_EQ(r.wrong(i), 0);
  EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << r.e.message;
  for (int q = 0; q < 2; q++) ar_graph_destroy(rig::B, r.device(q), graphs[static_cast<size_t>(q)], &r.e);
}

// In the background drive a thread frees what a graph held, once the graph is gone.
TEST(Graphs, TheReaperLeavesNothing) {
  Machine m;
  m.drive = AR_DRIVE_BACKGROUND;
  Rig r(m, 2, 1 << 20, 64 << 10, 2);
  const size_t i = r.make_fed(AR_PATH_COPY_ENGINE, AR_BF16, 1000);
  const ar_graph graph = r.capture([&] { r.enqueue(i); });
  const int64_t before = ar_emulated_live_objects();
  ar_comm_close(r.comm, &r.e);
  r.launch(graph);
  ar_stream_synchronize(rig::B, r.device(0), r.streams[0], &r.e);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (rig::B == AR_BACKEND_EMULATED) {
    EXPECT_EQ(ar_emulated_live_objects(), before);
  }
  ar_graph_destroy(rig::B, r.device(0), graph, &r.e);
  for (int k = 0; k < 300 && ar_emulated_live_objects() != r.own_objects(); k++)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  r.renew();  // looks that nothing is left
}

// Close does not wait for a capture that is still open.
TEST(Graphs, CloseInsideACapture) {
  for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE}) {
    Rig r(Machine{}, 2, 1 << 20, 64 << 10, 2);
    const size_t i = r.make_fed(path, AR_BF16, 400000);
    double seconds = 0;
    const ar_graph graph = r.capture([&] {
      r.enqueue(i);
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(ar_comm_close(r.comm, &r.e), AR_OK);
      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
    EXPECT_LT(seconds, 0.5);
    ASSERT_NE(graph, 0u) << r.e.message;
    r.launch(graph);
    for (int q = 0; q < 2; q++)
      ASSERT_EQ(ar_stream_synchronize(rig::B, r.device(q), r.streams[static_cast<size_t>(q)], &r.e), AR_OK);
    ar_graph_destroy(rig::B, r.device(0), graph, &r.e);
    r.renew();
  }
}

// A capture that cannot end well: a stream is left unjoined. The communicator goes on, streams too once the capture is over.
TEST(Graphs, ACaptureAbortedInTheMiddle) {
  for (int path : {AR_PATH_INTERNAL, AR_PATH_COPY_ENGINE}) {
    Rig r(Machine{}, 2, 1 << 20, 64 << 10, 2);
    const size_t i = r.make_fed(path, AR_BF16, 100000);
    const ar_graph good = r.capture([&] { r.enqueue(i); });
    ASSERT_NE(good, 0u);
    for (int k = 0; k < 3; k++) {
      ar_graph graph = 0;
      ASSERT_EQ(ar_capture_begin(rig::B, r.device(0), r.streams[0], &r.e), AR_OK);
      r.fork();
      r.enqueue(i);
      EXPECT_NE(ar_capture_end(rig::B, r.device(0), r.streams[0], &graph, &r.e), AR_OK);  // rank 1 was not joined
      EXPECT_EQ(ar_comm_error(r.comm, &r.e), AR_OK) << r.e.message;
      r.refill(i);
      r.enqueue(i);
      r.wait();
      EXPECT_EQ(r.wrong(i), 0);
      r.launch(good);
      EXPECT_EQ(r.wrong(i), 0);
    }
    ar_graph_destroy(rig::B, r.device(0), good, &r.e);
  }
}

}  // namespace
