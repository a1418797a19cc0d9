package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/reference"
)

const (
	warmUps = 3 // reductions before the timed ones: lazy allocations, kernel loads, both slots of the copy engines
	replays = 5 // timed launches of a graph, after one that is not timed

	// The iterations rotate over sets of buffers, so that caches and slots cannot serve the last iteration's data. At
	// least 3 and an odd number: the library alternates two slots, and stale data must differ from what is expected.
	minSets   = 3
	maxSets   = 63
	setsBytes = 128 << 20 // of all sets of a rank, where 3 sets need no more

	alignment = 256
	poison    = 0xFF // fills the results before each batch: a NaN that no reduction stores
)

// bench measures and checks one size.
type bench struct {
	*session
	job    *runJob
	bytes  int64
	wire   allreduce.Type
	sets   []bufferSet
	stride int64 // from set to set in a rank's memory
	events []device.Event
	forks  []device.Event // one per rank, on its device
	send   []device.Ptr   // of each rank: all sets
	recv   []device.Ptr   // the same as send in place
	host   []byte         // one rank's results
}

// bufferSet is one reduction's buffers and data.
type bufferSet struct {
	buffers []allreduce.Buffer
	inputs  [][]byte // of each rank; nil where the devices keep them
	want    []byte
}

// measured is what came out of one size.
type measured struct {
	route  allreduce.Route
	micros []float64
	equal  bool
	wrong  int64
	sum    []byte // the last checked result of rank 0
}

// newBench allocates for one size; the session's cleanup frees.
func newBench(s *session, job *runJob, payload int64) (*bench, error) {
	b := &bench{session: s, job: job, bytes: payload}
	b.stride = (max(payload, 1) + alignment - 1) / alignment * alignment
	perSet := 2 * b.stride
	if job.inPlace {
		perSet = b.stride
	}
	sets := min(int(setsBytes/perSet), job.iters, maxSets)
	sets = max(sets-(sets+1)%2, minSets) // odd
	for rank, dev := range s.devices {
		send, err := b.malloc(dev, int64(sets)*b.stride)
		if err != nil {
			return nil, err
		}
		recv := send
		if !job.inPlace {
			if recv, err = b.malloc(dev, int64(sets)*b.stride); err != nil {
				return nil, err
			}
		}
		b.send, b.recv = append(b.send, send), append(b.recv, recv)
		event, err := s.newEvents(dev, 1)
		if err != nil {
			return nil, err
		}
		if b.forks = append(b.forks, event...); rank == 0 {
			if b.events, err = s.newEvents(dev, sets+1); err != nil {
				return nil, err
			}
		}
	}
	b.sets = make([]bufferSet, sets)
	for i := range b.sets {
		at := device.Ptr(int64(i) * b.stride)
		for local, rank := range s.ranks {
			b.sets[i].buffers = append(b.sets[i].buffers, allreduce.Buffer{
				Send: b.send[local] + at, Recv: b.recv[local] + at, Count: int(payload) / job.typ.Size(),
				Type: job.typ, Op: job.op, Stream: s.streams[local], Absent: job.absent[rank],
			})
		}
	}
	b.host = make([]byte, payload)
	return b, nil
}

// run warms up, then measures and checks. tick is called after each batch with the iterations it had.
func (b *bench) run(ctx context.Context, tick func(int)) (m measured, err error) {
	for i := range warmUps {
		if err := b.comm.AllReduce(b.sets[i%len(b.sets)].buffers); err != nil {
			return m, err
		}
	}
	if err := b.synchronize(); err != nil {
		return m, err
	}
	// After the warm-up: a path whose memory could not be had has its substitute by now.
	m.route = b.comm.RouteFor(b.sets[0].buffers[0])
	if b.wire = m.route.Wire; b.wire == allreduce.TypeNone {
		b.wire = b.job.typ
	}
	m.equal = true
	if b.job.graph {
		return m, b.runGraph(ctx, &m, tick)
	}
	return m, b.runEager(ctx, &m, tick)
}

// runEager enqueues batches of one reduction per set back to back, with an event after each, and checks every one.
func (b *bench) runEager(ctx context.Context, m *measured, tick func(int)) error {
	for done := 0; done < b.job.iters; {
		n := min(len(b.sets), b.job.iters-done)
		if err := b.prepare(ctx, n, 1); err != nil {
			return err
		}
		dev, stream := b.devices[0], b.streams[0]
		if err := b.driver.Record(dev, b.events[0], stream); err != nil {
			return err
		}
		for i := range n {
			if err := b.comm.AllReduce(b.sets[i].buffers); err != nil {
				return err
			}
			if err := b.driver.Record(dev, b.events[i+1], stream); err != nil {
				return err
			}
		}
		if err := b.synchronize(); err != nil {
			return err
		}
		for i := range n {
			us, err := b.driver.ElapsedMicros(dev, b.events[i], b.events[i+1])
			if err != nil {
				return err
			}
			m.micros = append(m.micros, us)
		}
		if err := b.check(m, n); err != nil {
			return err
		}
		done += n
		tick(n)
	}
	return nil
}

// runGraph captures all iterations in one graph over the devices, replays it, and checks every set after each replay.
func (b *bench) runGraph(ctx context.Context, m *measured, tick func(int)) error {
	used := min(len(b.sets), b.job.iters)
	graph, err := b.capture()
	if err != nil {
		return err
	}
	dev, stream := b.devices[0], b.streams[0]
	defer func() { _ = b.driver.DestroyGraph(dev, graph) }()
	for replay := range replays + 1 {
		if err := b.prepare(ctx, used, b.job.iters); err != nil {
			return err
		}
		if err := b.driver.Record(dev, b.events[0], stream); err != nil {
			return err
		}
		if err := b.driver.Launch(dev, graph, stream); err != nil {
			return err
		}
		if err := b.driver.Record(dev, b.events[1], stream); err != nil {
			return err
		}
		if err := b.synchronize(); err != nil {
			return err
		}
		us, err := b.driver.ElapsedMicros(dev, b.events[0], b.events[1])
		if err != nil {
			return err
		}
		if replay > 0 { // the first one uploads the graph
			m.micros = append(m.micros, us/float64(b.job.iters))
		}
		if err := b.check(m, used); err != nil {
			return err
		}
		tick(b.job.iters)
	}
	return nil
}

// capture makes the graph: the other ranks' streams join rank 0's capture and come back to it.
func (b *bench) capture() (device.Graph, error) {
	dev, stream := b.devices[0], b.streams[0]
	if err := b.driver.BeginCapture(dev, stream); err != nil {
		return 0, err
	}
	err := b.fork(b.forks[0])
	for i := 0; i < b.job.iters && err == nil; i++ {
		err = b.comm.AllReduce(b.sets[i%len(b.sets)].buffers)
	}
	if err == nil {
		err = b.join(b.forks)
	}
	graph, ending := b.driver.EndCapture(dev, stream) // also after a failure: the stream must not stay in capture
	if err == nil {
		return graph, ending
	}
	if ending == nil {
		_ = b.driver.DestroyGraph(dev, graph)
	}
	return 0, err
}

// prepare puts inputs and poison into the first n sets. uses is how often each iteration set is reduced before the
// check, in all; in place, a set that is used again adds its own result.
func (b *bench) prepare(ctx context.Context, n, uses int) error {
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	for i := range n {
		set := &b.sets[i]
		fresh := set.want == nil
		if fresh {
			set.inputs = b.inputs(i)
		} else if !b.job.inPlace {
			continue // the devices have them still
		}
		for local, dev := range b.devices {
			if err := b.driver.CopyToDevice(dev, set.buffers[local].Send, set.inputs[b.ranks[local]]); err != nil {
				return err
			}
		}
		if fresh {
			times := 1
			if b.job.inPlace && uses > 1 {
				times = (uses-i-1)/len(b.sets) + 1
			}
			if err := b.expect(set, times); err != nil {
				return err
			}
		}
		if !b.job.inPlace && b.job.arrays == nil {
			set.inputs = nil
		}
	}
	if b.job.inPlace {
		return nil
	}
	for rank, dev := range b.devices {
		if err := b.driver.FillAsync(dev, b.recv[rank], poison, int64(n)*b.stride, b.streams[rank]); err != nil {
			return err
		}
	}
	return b.synchronize()
}

// inputs makes set i's data: the files', or generated from the seed. An absent rank's is poison, which nothing may read.
func (b *bench) inputs(i int) [][]byte {
	inputs := make([][]byte, b.job.ranks)
	for rank := range inputs {
		switch {
		case b.job.absent[rank]:
			inputs[rank] = bytes.Repeat([]byte{poison}, int(b.bytes))
		case b.job.arrays != nil:
			inputs[rank] = b.job.arrays[rank].Data
		default:
			inputs[rank] = make([]byte, b.bytes)
			seed := b.job.seed*1_000_003 + uint64(b.bytes)*maxSets + uint64(i)
			reference.Fill(inputs[rank], b.job.input, reference.Type(b.job.typ), seed, rank)
		}
	}
	return inputs
}

// expect computes what a set must hold after so many reductions.
func (b *bench) expect(set *bufferSet, times int) error {
	inputs := set.inputs
	for range times {
		r := reference.Reduction{Type: reference.Type(b.job.typ), Wire: reference.Type(b.wire), Op: reference.Op(b.job.op),
			Inputs: inputs, Absent: b.job.absent, Count: int(b.bytes) / b.job.typ.Size()}
		want, err := r.Result()
		if err != nil {
			return err
		}
		set.want = want
		inputs = slices.Repeat([][]byte{want}, len(inputs))
	}
	return nil
}

// check compares every rank's result of the first n sets with the reference, and with rank 0's.
func (b *bench) check(m *measured, n int) error {
	for i := range n {
		set := &b.sets[i]
		for rank, dev := range b.devices {
			if err := b.driver.CopyToHost(dev, b.host, set.buffers[rank].Recv); err != nil {
				return err
			}
			if rank == 0 {
				m.sum = append(m.sum[:0], b.host...)
			} else if !bytes.Equal(m.sum, b.host) {
				m.equal = false
			}
			if !bytes.Equal(b.host, set.want) {
				count, _ := reference.Different(b.host, set.want, reference.Type(b.job.typ))
				m.wrong += int64(count)
			}
		}
	}
	return nil
}

// median of a list that is not empty.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// run opens the devices and runs every size; the report holds whatever was done when it fails. sum is the result of the
// last size.
func (j *runJob) run(ctx context.Context, report *runReport, printer *runPrinter) (sum []byte, err error) {
	if err := emulateMachine(j.emulate, driveOf(j.rank)); err != nil {
		return nil, err
	}
	driver, note, err := pickBackend(j.backend, ranksHere(j.rank, j.ranks), j.devices)
	if err != nil {
		return nil, err
	}
	if note != "" {
		report.Warnings = append(report.Warnings, note)
	}
	s, err := openSession(driver, createFor(ctx, j.rank), allreduce.Config{Ranks: j.ranks, Devices: j.devices, CacheDir: j.cache})
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := report.describe(s); err != nil {
		return nil, err
	}
	defer report.account(s)
	printer.begin(report)
	for _, payload := range j.bytes {
		result, m, err := j.runSize(ctx, s, payload, printer.tick)
		if err != nil {
			return nil, fmt.Errorf("%d bytes: %w", payload, err)
		}
		report.Results = append(report.Results, result)
		printer.row(report, result)
		sum = m.sum
	}
	return sum, nil
}

// runSize runs one size with memory of its own.
func (j *runJob) runSize(ctx context.Context, s *session, payload int64, tick func(int)) (runResult, measured, error) {
	kept := len(s.cleanup)
	defer func() {
		_ = s.synchronize() // after a failure something may still be on its way to the buffers
		s.closeFrom(kept)
	}()
	b, err := newBench(s, j, payload)
	if err != nil {
		return runResult{}, measured{}, err
	}
	before := s.comm.Stats()
	m, err := b.run(ctx, tick)
	if err != nil {
		return runResult{}, m, err
	}
	result := newRunResult(j, payload, m, before, s.comm.Stats())
	if j.rank != nil {
		err = result.gather(s, m.sum)
	}
	return result, m, err
}
