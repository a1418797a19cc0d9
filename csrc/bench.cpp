// What measurements need beside reductions (allreduce.h, "benchmarks"). Included by all_*.cpp behind devices.cpp, whose
// helpers it uses.
#include "kernels/compare.h"
#include "kernels/load.h"

namespace AR_NS {

int32_t copy_kind_async(int32_t d, ar_ptr to, ar_ptr from, int64_t n, int32_t kind, ar_stream s, ar_error* e) {
  if (n < 0) return bad_bytes("copying", n, e);
  if (kind < AR_COPY_HOST_TO_DEVICE || kind > AR_COPY_DEVICE_TO_DEVICE)
    return fail(e, AR_ERR_ARGUMENT, {}, "copying: kind %d; allowed: %d to %d", kind, AR_COPY_HOST_TO_DEVICE,
                AR_COPY_DEVICE_TO_DEVICE);
  return on_device(d, "copying", e, [&] {
    return copy_async(pointer(to), pointer(from), static_cast<size_t>(n), static_cast<CopyKind>(kind),
                      handle<Stream>(s));
  });
}
static_assert(static_cast<int>(CopyKind::host_to_device) == AR_COPY_HOST_TO_DEVICE &&
                  static_cast<int>(CopyKind::device_to_host) == AR_COPY_DEVICE_TO_HOST &&
                  static_cast<int>(CopyKind::device_to_device) == AR_COPY_DEVICE_TO_DEVICE,
              "ar_copy_kind is CopyKind");

int32_t bench_load(int32_t d, int32_t blocks, int64_t rounds, ar_stream s, ar_error* e) {
  if (blocks < 1 || rounds < 0)
    return fail(e, AR_ERR_ARGUMENT, {}, "load: %d blocks of %lld rounds", blocks, static_cast<long long>(rounds));
  return on_device(d, "launching the load kernel", e,
                   [&] { return launch(Load{rounds, 0.5f, -1.0f, nullptr}, blocks, kLoadThreads, handle<Stream>(s)); });
}

static_assert(AR_BENCH_COUNTERS % kCompareThreads == 0, "one counter for each thread of the compare kernel");

int32_t bench_compare(int32_t d, const ar_bench_rows* r, ar_ptr wrong, ar_stream s, ar_error* e) {
  const int32_t size = type_size(r->type);
  if (r->rows < 0 || r->count < 0 || (r->rows > 1 && (r->pitch < r->count * size || r->pitch % size != 0)))
    return fail(e, AR_ERR_ARGUMENT, {}, "compare: %lld rows of %lld elements, %lld bytes apart",
                static_cast<long long>(r->rows), static_cast<long long>(r->count), static_cast<long long>(r->pitch));
  const auto run = [&](auto type) {
    using K = Compare<decltype(type)>;
    const K k{static_cast<const char*>(pointer(r->got)),
              static_cast<const char*>(pointer(r->want)),
              static_cast<uint32_t*>(pointer(wrong)),
              r->rows,
              r->count,
              r->pitch,
              r->tolerance};
    return launch(k, AR_BENCH_COUNTERS / kCompareThreads, kCompareThreads, handle<Stream>(s));
  };
  return on_device(d, "launching the compare kernel", e, [&]() -> Code {
    switch (r->type) {
      case AR_F32:
        return run(F32{});
      case AR_F16:
        return run(F16{});
      default:
        return run(BF16{});
    }
  });
}

}  // namespace AR_NS
