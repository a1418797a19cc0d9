// Every ordering primitive of the transports, by id: each wait, fence, flag and slot turn goes through one wrapper with
// one of these, so that tests can list them, count them and take each one out (docs/reliability.md, "Mutations").
// A new primitive gets a line here; a primitive that no test misses when it is taken out is deleted.
#pragma once

// clang-format off
#define AR_ORDER_LIST(X)                                                                                             \
  X(call_order,         "a call waits for the previous call's end when its stream is another one")                  \
  X(internal_ll_wait,   "internal, small: a data word is used only with this epoch's flag beside it")               \
  X(internal_fence,     "internal, large: payload is visible system-wide before the block's flag")                  \
  X(internal_flag,      "internal, large: the block's flag is raised after its payload")                            \
  X(internal_wait,      "internal, large: a peer's payload is read after that block's flag")                        \
  X(internal_wait_fence,"internal, large: a fence between a peer's flag and its payload")                           \
  X(internal_slot,      "internal: slots alternate, so that a block writes where its peers have read")              \
  X(internal_join,      "internal: ranks of one device share a launch, which waits for and is awaited by their streams")  \
  X(peer_ll_wait,       "peer, small: a data word is used only with this epoch's flag beside it")                   \
  X(peer_ll_slot,       "peer, small: slots alternate, so that a block writes where its peers have read")           \
  X(peer_fence,         "peer, one-shot: payload is visible system-wide before the block's flag")                   \
  X(peer_flag,          "peer, one-shot: the block's flag is raised after its payload")                             \
  X(peer_wait,          "peer, one-shot: a peer's payload is read after that block's flag")                         \
  X(peer_wait_fence,    "peer, one-shot: a fence between a peer's flag and its payload")                            \
  X(peer_slot,          "peer, one-shot: four slots take turns, so that a block pushes one share ahead")            \
  X(peer_scatter_fence, "peer, two-shot: scattered values are visible system-wide before the block's flag")         \
  X(peer_scatter_flag,  "peer, two-shot: the block's flag is raised after what it scattered")                       \
  X(peer_scatter_wait,  "peer, two-shot: an owner sums its part after every peer's flag")                           \
  X(peer_scatter_wait_fence, "peer, two-shot: a fence between a peer's flag and what it scattered")                 \
  X(peer_scatter_slot,  "peer, two-shot: two slots take turns, so that a block scatters one share ahead")           \
  X(peer_gather_fence,  "peer, two-shot: totals are visible system-wide before the owner's flag")                   \
  X(peer_gather_flag,   "peer, two-shot: an owner's flag is raised after its totals")                               \
  X(peer_gather_wait,   "peer, two-shot: totals are read after their owner's flag")                                 \
  X(peer_gather_wait_fence, "peer, two-shot: a fence between an owner's flag and its totals")                       \
  X(peer_gather_slot,   "peer, two-shot: two slots of totals take turns")                                           \
  X(peer_join,          "peer: ranks of one device share a launch, which waits for and is awaited by their streams") \
  X(ce_send_ready,      "copy-engine: an upload starts after the caller's stream came to this call")                \
  X(ce_converted,       "copy-engine: a piece is uploaded after its conversion")                                    \
  X(ce_convert_reuse,   "copy-engine: a conversion waits for the upload that used its ring place")                  \
  X(ce_slot_free,       "copy-engine: an upload waits until the peers have read the pinned slot it overwrites")     \
  X(ce_chunk_arrived,   "copy-engine: a chunk is downloaded after its upload")                                      \
  X(ce_receive_reuse,   "copy-engine: a download waits for the sum that read its ring place")                       \
  X(ce_downloaded,      "copy-engine: a piece is summed after its download")                                        \
  X(ce_send_reuse,      "copy-engine: with an F32 wire the caller's stream waits for its own uploads") \
  X(two_send_ready,     "copy-engine, two-shot: an upload from the caller's tensor starts after its stream came to this call")  \
  X(two_converted,      "copy-engine, two-shot: a piece is uploaded after its conversion")  \
  X(two_convert_reuse,  "copy-engine, two-shot: a conversion waits for a one-shot call's upload from its ring place")  \
  X(two_box_free,       "copy-engine, two-shot: an upload to an owner's box waits until all have read what the slot held")  \
  X(two_arrived,        "copy-engine, two-shot: an owner downloads its box after every rank's upload to it")  \
  X(two_receive_reuse,  "copy-engine, two-shot: a box's download waits for the sum that read its ring place")  \
  X(two_collected,      "copy-engine, two-shot: a shard is summed after its box is downloaded")  \
  X(two_added,          "copy-engine, two-shot: a shard's total is uploaded after the sum")  \
  X(two_total_free,     "copy-engine, two-shot: a total's upload waits until all have read what the slot held")  \
  X(two_total_arrived,  "copy-engine, two-shot: a total is downloaded after its upload")  \
  X(two_recv_ready,     "copy-engine, two-shot: an absent rank's recv is written after its stream came to this call")  \
  X(two_gather_reuse,   "copy-engine, two-shot: an absent rank's download of totals waits for the store that read its ring place")  \
  X(two_gathered,       "copy-engine, two-shot: totals are used after their download")  \
  X(two_recv_reuse,     "copy-engine, two-shot: the caller's stream waits for the uploads from its recv")
// clang-format on

namespace ar {

enum class Order : int {
  none = 0,
#define AR_ORDER_ID(name, text) name,
  AR_ORDER_LIST(AR_ORDER_ID)
#undef AR_ORDER_ID
      count
};

}  // namespace ar
