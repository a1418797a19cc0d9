// Every schedule there is, for reductions small enough: which copy ends first, which block runs on, which store becomes
// visible when. After each one the sums are right and no hazard was found; the number of schedules is printed.
#define RIG_EMULATED_ONLY
#include "rig.h"

using rig::Case;
using rig::Machine;
using rig::Rig;

namespace {

constexpr int64_t kMost = 200000;

struct Result {
  int64_t schedules = 0;
  bool complete = false;
  std::string bad;
};

// Depth first over the picks: the last one that has another choice goes on to it. One machine, whose state after a call is
// that before it but for the slots that alternate.
Result all_schedules(const Case& c, int calls, int64_t limit, int mutant = 0) {
  Result result;
  Machine m;
  m.schedule = AR_SCHEDULE_SCRIPTED;
  Rig r(m, 2, 1 << 20, 64 << 10, 1, 50);
  std::vector<size_t> made;
  for (int k = 0; k < calls; k++) made.push_back(r.make(c));
  for (int k = 0; k < 2; k++)
    for (size_t i : made) r.enqueue(i);
  r.wait();
  for (size_t i : made)
    if (r.wrong(i) != 0) result.bad = "wrong elements before the first schedule";
  const auto outputs = [&] {
    std::string bytes;
    for (size_t i : made)
      for (int q = 0; q < 2; q++) {
        const size_t at = bytes.size(), n = static_cast<size_t>(c.count * ar_type_size(c.type));
        bytes.resize(at + n);
        ar_copy_to_host(rig::B, r.device(q), &bytes[at], r.bufs(i)[static_cast<size_t>(q)].recv,
                        static_cast<int64_t>(n), &r.e);
      }
    return bytes;
  };
  const std::string right = outputs();
  std::vector<int32_t> picks;
  while (result.schedules < limit && result.bad.empty()) {
    for (size_t i : made)
      for (int q = 0; q < 2; q++) {
        const ar_buffer& b = r.bufs(i)[static_cast<size_t>(q)];
        ar_fill_async(rig::B, r.device(q), b.recv, 0x77, c.count * ar_type_size(c.type), b.stream, &r.e);
        ar_stream_synchronize(rig::B, r.device(q), b.stream, &r.e);
      }
    ar_emulated_mutate(mutant);
    ar_emulated_script(picks.data(), static_cast<int64_t>(picks.size()));
    for (size_t i : made)
      if (r.call(i) != AR_OK) result.bad = r.e.message;
    if (ar_comm_wait(r.comm, -1, &r.e) != AR_OK) result.bad = r.e.message;
    std::vector<int32_t> choices(static_cast<size_t>(ar_emulated_script_read(nullptr, 0)));
    ar_emulated_script_read(choices.data(), static_cast<int64_t>(choices.size()));
    ar_emulated_mutate(0);
    if (result.bad.empty() && outputs() != right) result.bad = "wrong elements";
    result.schedules++;
    picks.resize(choices.size());
    while (!picks.empty() && picks.back() + 1 >= choices[picks.size() - 1]) picks.pop_back();
    if (picks.empty()) {
      result.complete = true;
      return result;
    }
    picks.back()++;
  }
  return result;
}

void expect_all(const char* what, const Case& c, int calls) {
  const Result r = all_schedules(c, calls, kMost);
  std::cout << what << ": " << r.schedules << " schedules\n";
  EXPECT_EQ(r.bad, "") << what << ", schedule " << r.schedules;
  EXPECT_TRUE(r.complete) << what << ": more than " << r.schedules << " schedules";
  EXPECT_GT(r.schedules, 10);
}

TEST(Exhaustive, ACopyEngineReductionOfTwoChunks) {
  Case c;
  c.path = AR_PATH_COPY_ENGINE;
  c.count = 2 * (64 << 10) / 4;
  expect_all("two chunks, F32 wire", c, 1);
}

TEST(Exhaustive, TwoCopyEngineReductionsOfOneChunk) {
  Case c;
  c.path = AR_PATH_COPY_ENGINE;
  c.wire = AR_BF16;
  c.count = 1000;
  expect_all("two calls, BF16 wire", c, 2);
}

TEST(Exhaustive, SmallFlaggedReductions) {
  Case c;
  c.count = 1;
  expect_all("one word", c, 1);
  c.wire = AR_BF16;
  expect_all("one word, BF16 wire", c, 1);
}

// The adversary works: without a wait some schedule of these shows it.
TEST(Exhaustive, AMissingWaitIsMet) {
  Case c;
  c.path = AR_PATH_COPY_ENGINE;
  c.count = 2 * (64 << 10) / 4;
  for (int id = 1; ar_emulated_order_name(id) != nullptr; id++)
    if (std::string(ar_emulated_order_name(id)) == "ce_chunk_arrived") {
      const Result r = all_schedules(c, 1, 1000, id);
      EXPECT_NE(r.bad, "");
    }
}

}  // namespace
