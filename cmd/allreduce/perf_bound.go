package main

import (
	"context"
	"fmt"
	"math"
	"os"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// bounder measures what host-staged reductions cannot beat: the same wire bytes as bare copies, each chunk up and then,
// depending on it, down, through a pinned ring per rank. Two ranks: each uploads its chunk and downloads the peer's. More
// (two-shot): each uploads what the others need of it, downloads the others' parts of its own
// share, uploads the share, and downloads the others'. Nothing converts or adds.
//
// As in a row of reductions, a rank begins the next message when it has the last one's bytes.
type bounder struct {
	*perfRig
	ring     []device.Ptr // pinned, of each rank
	up, down []device.Stream
	// Two pools, since an event of a capture cannot be used outside.
	events [2]boundEvents
	known  map[boundKey]boundResult
	peers  map[int64]float64 // by wire bytes

	perByte float64 // byteTime's result
}

type boundKey struct{ wire, ring int64 }

// boundResult is the best of a run's chunks, eager or in a graph.
type boundResult struct {
	micros float64
	chunk  int64
}

type boundEvents struct {
	fork device.Event
	join []device.Event      // of each rank
	seen [2][][]device.Event // [phase][rank][slot]: the rank's upload of the slot is done
	read [2][][]device.Event // the rank has downloaded the slot of all its peers
}

const (
	defaultRing   = 8 << 20 // the library's own
	largeRing     = 16 << 20
	smallestChunk = 256 << 10
	maxRingSlots  = largeRing / smallestChunk
	boundRow      = 8 // messages in a row at most
)

// boundRing is the ring of the bound: the library's default, or a smaller one of this run.
func boundRing() int64 {
	if bytes, err := allreduce.ParseBytes(os.Getenv("GGML_CUDA_AR_RING_BYTES")); err == nil {
		return min(bytes, defaultRing)
	}
	return defaultRing
}

func (r *perfRig) newBounder() (*bounder, error) {
	b := &bounder{perfRig: r, known: map[boundKey]boundResult{}, peers: map[int64]float64{}}
	for _, dev := range r.devices {
		p, err := r.driver.MallocHost(largeRing)
		if err != nil {
			return nil, err
		}
		r.later(func() { _ = r.driver.FreeHost(p) })
		b.ring = append(b.ring, p)
		for _, list := range []*[]device.Stream{&b.up, &b.down} {
			s, err := r.driver.NewStream(dev)
			if err != nil {
				return nil, err
			}
			r.later(func() { _ = r.driver.DestroyStream(dev, s) })
			*list = append(*list, s)
		}
	}
	for pool := range b.events {
		e := &b.events[pool]
		for rank, dev := range r.devices {
			events, err := r.newEvents(dev, 2+4*maxRingSlots)
			if err != nil {
				return nil, err
			}
			if rank == 0 {
				e.fork = events[0]
			}
			e.join = append(e.join, events[1])
			for phase := range 2 {
				at := 2 + 2*phase*maxRingSlots
				e.seen[phase] = append(e.seen[phase], events[at:at+maxRingSlots])
				e.read[phase] = append(e.read[phase], events[at+maxRingSlots:at+2*maxRingSlots])
			}
		}
	}
	return b, nil
}

// of gives the bound for so many wire bytes per rank, for a ring of so many bytes.
func (b *bounder) of(ctx context.Context, wire, ring int64) (boundResult, error) {
	key := boundKey{wire, ring}
	if known, ok := b.known[key]; ok {
		return known, nil
	}
	best := boundResult{micros: math.Inf(1)}
	for _, chunk := range boundChunks(wire, ring) {
		for _, graph := range []bool{false, true} {
			if graph && b.simulated() {
				continue // the same on the simulated clock
			}
			if err := interrupted(ctx); err != nil {
				return best, err
			}
			us, err := b.measure(wire, ring, chunk, graph)
			if err != nil {
				return best, fmt.Errorf("the bound for %d bytes in chunks of %d: %w", wire, chunk, err)
			}
			if us < best.micros {
				best = boundResult{us, chunk}
			}
		}
	}
	b.known[key] = best
	return best, nil
}

// boundChunks are the powers of two that leave the ring two slots, and the message itself where it does.
func boundChunks(wire, ring int64) []int64 {
	var list []int64
	for chunk := int64(smallestChunk); chunk <= ring/2 && chunk < wire; chunk *= 2 {
		list = append(list, chunk)
	}
	if wire <= ring/2 {
		list = append(list, wire)
	}
	return list
}

// measure times rows of messages and gives the median for one message.
func (b *bounder) measure(wire, ring, chunk int64, graph bool) (float64, error) {
	repeats, messages := 5, int(max(2, min(boundRow, (64<<20)/wire)))
	if b.simulated() {
		repeats, messages = 1, int(max(2, min(boundRow, (2<<20)/wire)))
	}
	dev, stream := b.devices[0], b.up[0]
	pool := 0
	var executable device.Graph
	if graph {
		pool = 1
		if err := b.driver.BeginCapture(dev, stream); err != nil {
			return 0, err
		}
		err := b.row(&b.events[pool], wire, ring, chunk, messages)
		captured, ending := b.driver.EndCapture(dev, stream)
		if err != nil || ending != nil {
			if ending == nil {
				_ = b.driver.DestroyGraph(dev, captured)
			}
			return 0, firstError(err, ending)
		}
		executable = captured
		defer func() { _ = b.driver.DestroyGraph(dev, executable) }()
	}
	var samples []float64
	for repeat := range repeats + 1 {
		start, stop := b.perfRig.events[0][0], b.perfRig.events[0][1]
		if !b.simulated() { // holds the stream while the row is enqueued
			if err := b.driver.Load(dev, 1, gateRounds, stream); err != nil {
				return 0, err
			}
		}
		err := b.driver.Record(dev, start, stream)
		if err == nil {
			if graph {
				err = b.driver.Launch(dev, executable, stream)
			} else {
				err = b.row(&b.events[pool], wire, ring, chunk, messages)
			}
		}
		if err == nil {
			err = b.driver.Record(dev, stop, stream)
		}
		if err == nil {
			err = b.driver.Synchronize(dev, stream)
		}
		if err != nil {
			return 0, err
		}
		us, err := b.driver.ElapsedMicros(dev, start, stop)
		if err != nil {
			return 0, err
		}
		if repeat > 0 || repeats == 1 { // the first warms up
			samples = append(samples, us/float64(messages))
		}
	}
	return median(samples), nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// row enqueues messages one after the other, from and back to rank 0's upload stream.
func (b *bounder) row(e *boundEvents, wire, ring, chunk int64, messages int) error {
	q := &copyQueue{bounder: b, e: e, recorded: map[device.Event]bool{}}
	q.record(0, e.fork, b.up[0])
	for rank := range b.devices {
		q.wait(rank, b.up[rank], e.fork)
		q.wait(rank, b.down[rank], e.fork)
	}
	turn, slots := 0, int(min(ring/chunk, maxRingSlots))
	for m := range messages {
		if m > 0 {
			for rank := range b.devices {
				q.record(rank, e.join[rank], b.down[rank])
				q.wait(rank, b.up[rank], e.join[rank])
			}
		}
		for from := int64(0); from < wire; from += chunk {
			q.chunk(turn%slots, chunk, device.Ptr(from), min(chunk, wire-from))
			turn++
		}
	}
	for rank := range b.devices {
		q.record(rank, e.join[rank], b.down[rank])
		q.wait(0, b.up[0], e.join[rank])
	}
	return q.err
}

// copyQueue enqueues until something fails.
type copyQueue struct {
	*bounder
	e        *boundEvents
	recorded map[device.Event]bool // in this row: a wait for an older record would leave a capture
	err      error
}

func (q *copyQueue) record(rank int, ev device.Event, s device.Stream) {
	if q.err == nil {
		q.err = q.driver.Record(q.devices[rank], ev, s)
		q.recorded[ev] = true
	}
}

func (q *copyQueue) wait(rank int, s device.Stream, ev device.Event) {
	if q.err == nil && q.recorded[ev] {
		q.err = q.driver.WaitEvent(q.devices[rank], s, ev)
	}
}

func (q *copyQueue) copy(rank int, to, from device.Ptr, bytes int64, kind device.CopyKind, s device.Stream) {
	if q.err == nil && bytes > 0 {
		q.err = q.driver.CopyKindAsync(q.devices[rank], to, from, bytes, kind, s)
	}
}

// chunk moves one chunk of all ranks through a slot of size bytes of every ring.
func (q *copyQueue) chunk(slot int, size int64, from device.Ptr, bytes int64) {
	at := device.Ptr(int64(slot) * size)
	n := int64(len(q.devices))
	// Phase 0 moves every rank's values to the ranks that add them, phase 1 (three ranks and more) the sums back.
	outgoing, share := []int64{bytes}, bytes
	if n > 2 {
		share = bytes / n
		outgoing = []int64{share * (n - 1), share}
	}
	for phase, up := range outgoing {
		place := at
		if phase == 1 {
			place += device.Ptr(outgoing[0])
		}
		for rank := range q.devices {
			for peer := range q.devices { // they have read what the slot held
				if peer != rank {
					q.wait(rank, q.up[rank], q.e.read[phase][peer][slot])
				}
			}
			if phase == 1 {
				q.wait(rank, q.up[rank], q.e.read[0][rank][slot]) // the share is complete
			}
			q.copy(rank, q.ring[rank]+place, q.arena.send[rank]+from, up, device.DeviceToHost, q.up[rank])
			q.record(rank, q.e.seen[phase][rank][slot], q.up[rank])
		}
		for rank := range q.devices {
			to := q.arena.recv[rank] + from
			for peer := range q.devices {
				if peer == rank {
					continue
				}
				q.wait(rank, q.down[rank], q.e.seen[phase][peer][slot])
				q.copy(rank, to, q.ring[peer]+place, share, device.HostToDevice, q.down[rank])
				to += device.Ptr(share)
			}
			q.record(rank, q.e.read[phase][rank][slot], q.down[rank])
		}
	}
}

// bound fills in a row's bound: that of the peer path's links, or of the way through the host.
func (b *bounder) bound(ctx context.Context, row *perfRow, wire allreduce.Type) error {
	bytes := row.Count * int64(wire.Size())
	if row.Path == allreduce.PathPeer.String() {
		us, err := b.peerOf(ctx, bytes)
		if err != nil {
			return err
		}
		if row.BoundUs = round3(us); row.Ours.Median > 0 {
			row.PercentOfBound = round3(100 * us / row.Ours.Median)
		}
		return nil
	}
	own, err := b.of(ctx, bytes, boundRing())
	if err != nil {
		return err
	}
	large, err := b.of(ctx, bytes, largeRing)
	if err != nil {
		return err
	}
	row.BoundUs, row.BoundChunk, row.Bound16Us = round3(own.micros), own.chunk, round3(large.micros)
	if row.Ours.Median > 0 {
		row.PercentOfBound = round3(100 * own.micros / row.Ours.Median)
	}
	return b.model(row, bytes)
}
