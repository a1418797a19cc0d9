package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
)

// burst is a few reductions of one kind back to back, each with buffers of its own, a window apart.
type burst struct {
	lane    *lane
	typ     allreduce.Type
	op      allreduce.Op
	bytes   int64 // payload of each
	stride  int64
	n       int
	inPlace bool
	sets    []int // of each rank here: which of its streams
	from    int64 // where the first takes its inputs in the pool
	to      int64 // and where it puts its results in recv
	route   allreduce.Route
	key     wantKey
}

// soakGraph is a captured row of bursts.
type soakGraph struct {
	handle device.Graph
	bursts []burst
	calls  int64
	bytes  int64
}

const (
	maxBurst       = 16
	maxGraphBursts = 4
)

// draw makes up a burst whose results fit into room bytes at recv's offset to. False: not even one reduction fits.
func (r *soakRig) draw(rng *rand.Rand, to, room int64) (burst, bool) {
	b := burst{lane: &r.lanes[rng.IntN(len(r.lanes))], typ: r.job.types[rng.IntN(len(r.job.types))], inPlace: rng.IntN(4) == 0}
	if rng.IntN(4) == 0 {
		b.op = allreduce.Avg
	}
	for rank := range r.job.ranks {
		if set := rng.IntN(streamSets); slices.Contains(r.ranks, rank) {
			b.sets = append(b.sets, set)
		}
	}
	b.bytes = r.job.size(rng.Float64(), b.typ)
	b.stride = soakStride(b.bytes)
	b.n = 1 + rng.IntN(maxBurst)
	b.n = int(min(int64(b.n), room/b.stride, r.poolSize/b.stride))
	element := int64(b.typ.Size())
	shift := func() int64 {
		if rng.IntN(8) != 0 {
			return 0
		}
		return int64(rng.IntN(maxShift+1)) * element
	}
	b.from = rng.Int64N(r.poolSize-int64(b.n)*b.stride+1)/alignment*alignment + shift()
	b.to = to + shift()
	b.route = b.lane.comm.Route(b.bytes, b.typ, b.op)
	if b.route.Path == allreduce.PathNCCL && r.job.ranks&(r.job.ranks-1) != 0 {
		b.op = allreduce.Sum // such an average is not exact in any order
		b.route = b.lane.comm.Route(b.bytes, b.typ, b.op)
	}
	b.key = r.keyOf(b.route, b.typ, b.op)
	return b, b.n > 0
}

// used is how much of recv a burst takes.
func (b *burst) used() int64 { return int64(b.n) * b.stride }

// enqueue puts a burst on its streams: poison or inputs into the results, the reductions, the comparison. Nothing waits.
func (r *soakRig) enqueue(b *burst) error {
	pool, err := r.pool(b.key.poolKey)
	if err != nil {
		return err
	}
	want, err := r.want(b.key)
	if err != nil {
		return err
	}
	from, to := device.Ptr(b.from), device.Ptr(b.to)
	extent := b.used() - b.stride + b.bytes
	buffers := make([]allreduce.Buffer, len(r.devices))
	for rank, dev := range r.devices {
		stream := r.streams[b.sets[rank]][rank]
		send, recv := pool.device[rank]+from, r.recv[rank]+to
		if b.inPlace {
			send, err = recv, r.driver.CopyAsync(dev, recv, send, extent, stream)
		} else {
			err = r.driver.FillAsync(dev, recv, poison, extent, stream)
		}
		if err != nil {
			return err
		}
		buffers[rank] = allreduce.Buffer{Send: send, Recv: recv, Count: int(b.bytes) / b.typ.Size(), Type: b.typ, Op: b.op, Stream: stream}
	}
	for i := range b.n {
		if i > 0 {
			for rank := range buffers {
				buffers[rank].Send += device.Ptr(b.stride)
				buffers[rank].Recv += device.Ptr(b.stride)
			}
		}
		if err := b.lane.comm.AllReduce(buffers); err != nil {
			return fmt.Errorf("path %s, wire %s, %d bytes of %s: %w", b.lane.path, b.lane.wire, b.bytes, b.typ, err)
		}
	}
	// A path whose memory cannot be had is replaced in the first of the calls.
	if now := b.lane.comm.Route(b.bytes, b.typ, b.op); now.Path != b.route.Path || now.Wire != b.route.Wire {
		b.route, b.key.wire = now, r.keyOf(now, b.typ, b.op).wire
		if want, err = r.want(b.key); err != nil {
			return err
		}
	}
	for rank, dev := range r.devices {
		set := b.sets[rank]
		rows := device.Rows{Got: r.recv[rank] + to, Want: want[rank] + from, Rows: b.n, Count: int(b.bytes) / b.typ.Size(),
			Pitch: b.stride, Type: int32(b.typ)}
		if err := r.driver.Compare(dev, rows, r.wrong[set][rank], r.streams[set][rank]); err != nil {
			return err
		}
	}
	return nil
}

// capture makes a graph whose results lie in a slot of recv.
func (r *soakRig) capture(rng *rand.Rand, slot int) (g *soakGraph, err error) {
	g = &soakGraph{}
	at, end := r.space+int64(slot)*r.slot, r.space+int64(slot+1)*r.slot
	for range 1 + rng.IntN(maxGraphBursts) {
		b, fits := r.draw(rng, at, end-at)
		if !fits {
			break
		}
		if b.route.Path == allreduce.PathCopyEngine && r.job.rank != nil {
			continue // across processes that path cannot be captured
		}
		at += b.used()
		g.bursts, g.calls, g.bytes = append(g.bursts, b), g.calls+int64(b.n), g.bytes+int64(b.n)*b.bytes
	}
	dev, stream := r.devices[0], r.streams[0][0]
	if err := r.driver.BeginCapture(dev, stream); err != nil {
		return nil, err
	}
	err = r.fork(r.captured[0][0])
	for i := range g.bursts {
		if err == nil {
			err = r.enqueue(&g.bursts[i])
		}
	}
	if err == nil {
		err = r.join(&r.captured)
	}
	handle, ending := r.driver.EndCapture(dev, stream) // also after a failure: the stream must not stay in capture
	if g.handle = handle; err == nil {
		return g, ending
	}
	if ending == nil {
		_ = r.driver.DestroyGraph(dev, handle)
	}
	return nil, err
}

// launch replays a graph once. Replays and eager calls on the same communicators are ordered here, as the caller must.
func (r *soakRig) launch(g *soakGraph) error {
	if err := r.join(&r.events); err != nil {
		return err
	}
	if err := r.driver.Launch(r.devices[0], g.handle, r.streams[0][0]); err != nil {
		return err
	}
	return r.fork(r.events[0][0])
}

// wrongElements adds up the counters of all comparisons; the streams are synchronised.
func (r *soakRig) wrongElements() (total int64, err error) {
	for set := range streamSets {
		for rank, dev := range r.devices {
			if err := r.driver.CopyToHost(dev, r.counters, r.wrong[set][rank]); err != nil {
				return 0, err
			}
			for at := 0; at < len(r.counters); at += 4 {
				total += int64(binary.LittleEndian.Uint32(r.counters[at:]))
			}
		}
	}
	return total, nil
}

// inspect looks at a burst's results on the host: how many of its calls are wrong, and the first of them. equal says
// whether every rank holds the same.
func (r *soakRig) inspect(b *burst) (wrongCalls int64, first *soakFinding, equal bool, err error) {
	want := r.wants[b.key]
	equal = true
	for i := range b.n {
		at := device.Ptr(int64(i) * b.stride)
		var rank0 []byte
		bad := false
		for rank, dev := range r.devices {
			got, expected := make([]byte, b.bytes), make([]byte, b.bytes)
			if err := r.driver.CopyToHost(dev, got, r.recv[rank]+device.Ptr(b.to)+at); err != nil {
				return 0, nil, false, err
			}
			if err := r.driver.CopyToHost(dev, expected, want[rank]+device.Ptr(b.from)+at); err != nil {
				return 0, nil, false, err
			}
			if rank == 0 {
				rank0 = got
			}
			equal = equal && bytes.Equal(rank0, got)
			if bytes.Equal(got, expected) {
				continue
			}
			bad = true
			if first == nil {
				first = b.finding(i, r.ranks[rank], got, expected)
			}
		}
		if bad {
			wrongCalls++
		}
	}
	return wrongCalls, first, equal, nil
}

// finding describes the first wrong element of one rank's result of call i of a burst.
func (b *burst) finding(i, rank int, got, expected []byte) *soakFinding {
	count, element := reference.Different(got, expected, reference.Type(b.typ))
	f := &soakFinding{Kind: findingMismatch, Call: int64(i), Rank: rank, Element: int64(element), Wrong: int64(count)}
	f.describe(b)
	size := b.typ.Size()
	f.Got, f.Expected = bitsOf(got[element*size:][:size]), bitsOf(expected[element*size:][:size])
	return f
}

// bitsOf writes an element as a number in hexadecimal.
func bitsOf(element []byte) string {
	if len(element) == 2 {
		return fmt.Sprintf("0x%04x", binary.LittleEndian.Uint16(element))
	}
	return fmt.Sprintf("0x%08x", binary.LittleEndian.Uint32(element))
}
