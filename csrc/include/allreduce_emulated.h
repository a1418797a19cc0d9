/* allreduce_emulated.h: controls of the emulated backend (docs/architecture.md, "The emulated machine").
 *
 * The emulated machine is one per process. Nothing here has any effect on CUDA. Times are simulated microseconds.
 */
#ifndef ALLREDUCE_EMULATED_H
#define ALLREDUCE_EMULATED_H

#include "allreduce.h"

#ifdef __cplusplus
extern "C" {
#endif

#define AR_EMULATED_MAX_DEVICES 16

typedef enum ar_emulated_drive {
  AR_DRIVE_BACKGROUND = 0, /* a worker thread runs the devices; deadlines use real time (the default) */
  AR_DRIVE_STEPPED = 1     /* work advances only inside calls that wait or query; deterministic by seed */
} ar_emulated_drive;

typedef enum ar_emulated_schedule {
  AR_SCHEDULE_FIFO = 0,        /* earliest simulated time first: times mean something */
  AR_SCHEDULE_RANDOM = 1,      /* any ready operation, by seed */
  AR_SCHEDULE_ADVERSARIAL = 2, /* the latest possible: newest first, copies last, one device starved by seed */
  AR_SCHEDULE_PRIORITIES = 3,  /* PCT: every stream and block has a random priority, which drops now and then: finds
                                  what needs few but far apart changes of turn */
  AR_SCHEDULE_SCRIPTED = 4     /* the caller's picks (ar_emulated_script): to go through every schedule there is */
} ar_emulated_schedule;

/* One device. Rates are GB/s (10^9 bytes per second); 0 takes the default: the reference machine's, a PCIe 5 x16
 * link (55 one way, 48 each way with both directions busy). */
typedef struct ar_emulated_device {
  double h2d_gbs, d2h_gbs;    /* one direction alone */
  double duplex_gbs;          /* each direction while both are busy */
  double memory_gbs;          /* device memory, default 4000 */
  double kernel_host_gbs;     /* a kernel's own loads, or stores, to host memory, default 44: what
                                 fits the measured one-kernel exchange (it stores, then loads) */
  int32_t sms;                /* default 132 */
  int32_t resident_blocks;    /* blocks resident at once on the device, default 132 * 2 */
  int32_t cc_major, cc_minor; /* default 9.0 */
  int32_t uplink;             /* index of the shared uplink this device hangs on, -1: none */
  int32_t reserved;
  int64_t memory_bytes; /* default 8 GiB; allocations beyond it fail */
} ar_emulated_device;

typedef struct ar_emulated_machine {
  uint32_t size;   /* sizeof(ar_emulated_machine) */
  int32_t devices; /* 1..AR_EMULATED_MAX_DEVICES */
  ar_emulated_device device[AR_EMULATED_MAX_DEVICES];
  double uplink_gbs[AR_EMULATED_MAX_DEVICES]; /* each direction, by uplink index */
  double host_gbs; /* all flows together through host memory, default 184 (four flows of 46) */
  double peer_gbs; /* peer copies and stores, default 376 */
  uint8_t peer[AR_EMULATED_MAX_DEVICES][AR_EMULATED_MAX_DEVICES]; /* 1: the driver grants peer access */
  double copy_us;                                                 /* fixed cost of a copy, default 3 */
  double launch_us;                                               /* launch of a kernel, default 2 */
  double hop_us;    /* event from one device seen by another, default 4.8 less the launch */
  double flag_us;   /* flag through pinned memory, one way, default 1.6 */
  int32_t drive;    /* ar_emulated_drive */
  int32_t schedule; /* ar_emulated_schedule */
  uint64_t seed;
  int32_t unchecked; /* 1: no hazard checker (for tests that race on purpose) */
  int32_t lifetimes; /* 1: a stream or event destroyed before the host waited for its work is a hazard too (CUDA lets
                        that work finish, so by default it is none) */
} ar_emulated_machine;

/* Fills *machine with the defaults: n devices, no peer access, background drive. */
AR_API void ar_emulated_defaults(ar_emulated_machine* machine, int32_t n);

/* Replaces the emulated machine. AR_ERR_ARGUMENT while anything of the old one is still allocated, unless force is 1
 * (then all old handles are dead). The first use of the backend without this call makes 8 default devices. */
AR_API int32_t ar_emulated_configure(const ar_emulated_machine* machine, int32_t force, ar_error* error);

/* The simulated clock. */
AR_API double ar_emulated_now_us(void);

/* Kinds of calls that a fault can hit. */
typedef enum ar_emulated_call {
  AR_CALL_MALLOC_DEVICE = 0,
  AR_CALL_MALLOC_HOST = 1,
  AR_CALL_COPY = 2,
  AR_CALL_LAUNCH = 3,
  AR_CALL_RECORD = 4,
  AR_CALL_WAIT = 5,
  AR_CALL_STREAM_CREATE = 6,
  AR_CALL_EVENT_CREATE = 7,
  AR_CALL_GRAPH = 8,
  AR_CALL_IPC_OPEN = 9, /* of memory that another process has exported */
  AR_CALL_KINDS = 10
} ar_emulated_call;

/* The nth next call of this kind (1 = the next) fails with a runtime error, once; 0 clears the fault. */
AR_API void ar_emulated_fail(int32_t call, int64_t nth);

/* How many calls of this kind are still to come before the fault; 0: it struck, or there is none. */
AR_API int64_t ar_emulated_fail_left(int32_t call);

/* The nth next store of a kernel for other processors never arrives: flag 1: of flags (4 bytes), flag 0: of 16 bytes of
 * data, which in LL words carry flags. Once; nth 0 takes it back. */
AR_API void ar_emulated_drop_store(int32_t flag, int64_t nth);

/* What goes wrong when `device` uses peer access to `peer`, although the driver grants it. */
typedef enum ar_emulated_peer_fault_kind {
  AR_PEER_GOOD = 0,
  AR_PEER_DROPPED = 1,  /* stores and copies never arrive */
  AR_PEER_DELAYED = 2,  /* a kernel's stores of 16 bytes arrive when it has ended; flags overtake them */
  AR_PEER_MIRRORED = 3, /* stores and copies land in a mirror of the writer's own, and read back fine there */
  AR_PEER_BOUNCED = 4,  /* right, but through the host: slower than staging there would be */
  AR_PEER_HANG = 5      /* the access never ends, nor does whoever waits for it */
} ar_emulated_peer_fault_kind;
/* Until the machine is configured anew. AR_ERR_ARGUMENT for devices or a fault that do not exist. */
AR_API int32_t ar_emulated_peer_fault(int32_t device, int32_t peer, int32_t fault);

/* The device is lost when it starts its next operation but `after`: what runs on it ends without effect, and so does
 * whatever comes; calls on it return AR_ERR_DEVICE_LOST. Until the machine is configured anew. */
AR_API void ar_emulated_lose(int32_t device, int64_t after);

/* Takes one ordering primitive (csrc/order.h) out, so that a test can show that its absence is noticed; 0: none. */
AR_API void ar_emulated_mutate(int32_t order_id);
/* Name and one-sentence meaning of an ordering primitive, NULL past the last; ids start at 1. */
AR_API const char* ar_emulated_order_name(int32_t order_id);
AR_API const char* ar_emulated_order_text(int32_t order_id);
/* How often an ordering primitive was passed since the machine was configured. */
AR_API int64_t ar_emulated_order_count(int32_t order_id);

/* For AR_SCHEDULE_SCRIPTED: where several things can happen next, picks[i] (then 0, beyond n) is which one does, counted
 * over such points only. What can be picked: which copy ends, which block runs on (a kernel without flags: all of it), which
 * waiting block looks again, which store becomes visible. Copies and kernels start as soon as they may, the worst there is: a copy's destination holds
 * poison from then on. */
AR_API void ar_emulated_script(const int32_t* picks, int64_t n);
/* How many choices there were at each point so far, up to n of them; returns the number of points. Going through all
 * sequences of picks below these numbers goes through every schedule. */
AR_API int64_t ar_emulated_script_read(int32_t* choices, int64_t n);

/* Accesses that nothing orders, found since the machine was configured: a read or write of a range that another op,
 * kernel block or stream wrote (or read, and this writes it) without stream order, event, graph edge, flag or host call
 * between them, or pinned memory freed so. Found whatever the schedule did this time. The first is in
 * ar_emulated_report(), with both accesses and the seed; from then on the device of the second access reports
 * AR_ERR_HAZARD. */
AR_API int64_t ar_emulated_hazards(void);

/* The first hazard, or else the last deadlock or misuse report, "" if none (text for people; valid until the next call). */
AR_API const char* ar_emulated_report(void);
/* Allocations, streams, events and graphs of the emulated machine that are alive. */
AR_API int64_t ar_emulated_live_objects(void);

#ifdef __cplusplus
}
#endif
#endif /* ALLREDUCE_EMULATED_H */
