package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

// cell is what a row of the report measures: a size, in one mode, in one place.
type cell struct {
	bytes   int64
	mode    string
	inPlace bool
}

// trial measures one side in one cell, repeat by repeat.
type trial struct {
	*side
	rig    *perfRig
	cell   cell
	route  allreduce.Route
	before allreduce.Stats
	sets   [][]allreduce.Buffer // one per window
	next   int                  // the window the next batch begins with
	plan   plan
	graph  device.Graph

	samples []float64 // microseconds a reduction
	runs    []float64 // the median of each repeat
	wrong   int64
}

// plan is how many reductions a repeat has, and how they are timed.
type plan struct {
	iters     int // of a repeat; in a graph the captured ones times the launches
	capped    bool
	batch     int // eager: timed reductions between two looks at the data
	lead      int // eager: untimed ones before them, so that the devices have work when the clock starts
	perSample int // reductions between two events
	captured  int // graph
	launches  int // graph
}

const (
	maxSamplesPerBatch = maxSets
	eagerLead          = 3
	// An event after each reduction costs the host half a microsecond: below this time one event serves several.
	samplePerReduction = 50 * time.Microsecond
	eagerPerSample     = 10
	// A kernel of this many rounds (60 us) holds the stream while the host enqueues a graph launch behind it.
	gateRounds       = 260
	launchesPerBatch = 16
)

// newTrial warms a side up in a cell and plans its repeats.
func (r *perfRig) newTrial(ctx context.Context, s *side, c cell) (t *trial, err error) {
	t = &trial{side: s, rig: r, cell: c, before: s.comm.Stats()}
	for i := range r.windows(c.bytes) {
		t.sets = append(t.sets, t.buffers(i))
	}
	if err := t.reset(0, len(t.sets)); err != nil {
		return nil, err
	}
	for i := range r.job.Warmup {
		if err := s.comm.AllReduce(t.sets[i%len(t.sets)]); err != nil {
			return nil, err
		}
	}
	if err := s.synchronize(); err != nil {
		return nil, err
	}
	// By the host's clock, so that emulated devices, whose clock is another, end in time as well.
	const probes = 2
	start := time.Now()
	for i := range probes {
		if err := s.comm.AllReduce(t.sets[i]); err != nil {
			return nil, err
		}
	}
	if err := s.synchronize(); err != nil {
		return nil, err
	}
	each, err := t.slowest(time.Since(start) / probes)
	if err != nil {
		return nil, err
	}
	t.plan = r.job.plan(c, each, len(t.sets))
	t.route = s.comm.RouteFor(t.sets[0][0]) // after the warm-up: what could not be allocated has its substitute
	if c.mode == modeGraph {
		if t.graph, err = t.capture(); err != nil {
			return nil, err
		}
		// The first launch uploads the graph.
		if err := s.driver.Launch(s.devices[0], t.graph, s.streams[0]); err != nil {
			return nil, err
		}
		if err := s.synchronize(); err != nil {
			t.close()
			return nil, err
		}
	}
	return t, interrupted(ctx)
}

// slowest is the longest of the processes' times, so that all make the same plan.
func (t *trial) slowest(mine time.Duration) (time.Duration, error) {
	all, err := together(&t.session, mine)
	if err != nil {
		return 0, err
	}
	return slices.Max(all), nil
}

// buffers are those of one window.
func (t *trial) buffers(window int) []allreduce.Buffer {
	at := device.Ptr(int64(window) * windowBytes(t.cell.bytes))
	list := make([]allreduce.Buffer, len(t.devices))
	for rank := range list {
		send := t.rig.arena.send[rank]
		if t.cell.inPlace {
			send = t.rig.arena.recv[rank]
		}
		list[rank] = allreduce.Buffer{Send: send + at, Recv: t.rig.arena.recv[rank] + at, Count: int(t.cell.bytes) / t.rig.job.Type.Size(),
			Type: t.rig.job.Type, Op: t.rig.job.Op, Stream: t.streams[rank]}
	}
	return list
}

func interrupted(ctx context.Context) error {
	if ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return nil
}

// plan fits a repeat into the budget where -n does not say how long it is.
func (j *perfJob) plan(c cell, each time.Duration, windows int) plan {
	p := plan{iters: j.Iters, perSample: 1}
	if p.iters == 0 {
		p.iters = defaultIters
		if j.Launches > 0 && c.mode == modeGraph {
			p.iters = graphIters
		} else if fit := int(j.Budget / max(each, 1)); fit < p.iters {
			p.iters, p.capped = max(fit, minSets-1), true
		}
	}
	if c.mode == modeGraph {
		p.captured, p.launches = min(p.iters, graphIters, windows), j.Launches
		if j.Launches > 0 {
			p.captured = p.iters
			if c.inPlace { // a window that is used twice would hold another sum
				p.captured = min(p.iters, windows)
			}
		} else {
			p.launches = (p.iters + p.captured - 1) / p.captured
		}
		p.iters = p.captured * p.launches
		return p
	}
	p.lead = min(eagerLead, windows/3)
	p.batch = min(p.iters, windows-p.lead)
	if each < samplePerReduction && p.batch > eagerPerSample {
		p.perSample = eagerPerSample
		p.batch -= p.batch % eagerPerSample
	}
	return p
}

func (t *trial) close() {
	if t.graph != 0 {
		_ = t.driver.DestroyGraph(t.devices[0], t.graph)
		t.graph = 0
	}
}

// capture makes the graph: the other ranks' streams join rank 0's capture and come back to it.
func (t *trial) capture() (device.Graph, error) {
	dev, stream := t.devices[0], t.streams[0]
	if err := t.driver.BeginCapture(dev, stream); err != nil {
		return 0, err
	}
	err := t.fork(t.rig.captured[0])
	for i := 0; i < t.plan.captured && err == nil; i++ {
		err = t.comm.AllReduce(t.sets[i%len(t.sets)])
	}
	if err == nil {
		err = t.join(t.rig.captured)
	}
	graph, ending := t.driver.EndCapture(dev, stream) // also after a failure: the stream must not stay in capture
	if err == nil {
		return graph, ending
	}
	if ending == nil {
		_ = t.driver.DestroyGraph(dev, graph)
	}
	return 0, err
}

// reset enqueues that windows hold what they must before a reduction: in place the inputs, else a NaN none stores.
func (t *trial) reset(first, n int) error {
	stride := windowBytes(t.cell.bytes)
	at, bytes := device.Ptr(int64(first)*stride), int64(n)*stride
	for rank, dev := range t.devices {
		recv, stream := t.rig.arena.recv[rank]+at, t.streams[rank]
		var err error
		if t.cell.inPlace {
			err = t.driver.CopyAsync(dev, recv, t.rig.arena.send[rank]+at, bytes, stream)
		} else if t.rig.job.Check {
			err = t.driver.FillAsync(dev, recv, poison, bytes, stream)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// look enqueues the comparison of windows with what they must hold after a reduction.
func (t *trial) look(first, n int) error {
	if !t.rig.job.Check {
		return nil
	}
	stride := windowBytes(t.cell.bytes)
	at := device.Ptr(int64(first) * stride)
	for rank, dev := range t.devices {
		rows := device.Rows{Got: t.rig.arena.recv[rank] + at, Want: t.rig.arena.want[rank] + at, Rows: n,
			Count: int(t.cell.bytes) / t.rig.job.Type.Size(), Pitch: stride, Type: int32(t.rig.job.Type),
			Tolerance: t.rig.tolerance(t.route)}
		if err := t.driver.Compare(dev, rows, t.rig.arena.wrong[rank], t.streams[rank]); err != nil {
			return err
		}
	}
	return nil
}

// count adds the counters to wrong and clears them.
func (t *trial) count() error {
	if !t.rig.job.Check {
		return nil
	}
	counters := make([]byte, device.CountersBytes)
	for rank, dev := range t.devices {
		if err := t.driver.CopyToHost(dev, counters, t.rig.arena.wrong[rank]); err != nil {
			return err
		}
		found := false
		for at := 0; at < len(counters); at += 4 {
			if n := binary.LittleEndian.Uint32(counters[at:]); n > 0 {
				t.wrong += int64(n)
				found = true
			}
		}
		if found {
			if err := t.driver.FillAsync(dev, t.rig.arena.wrong[rank], 0, device.CountersBytes, t.streams[rank]); err != nil {
				return err
			}
		}
	}
	return nil
}

// repeat measures once and keeps the samples.
func (t *trial) repeat(ctx context.Context) error {
	if err := interrupted(ctx); err != nil {
		return err
	}
	measure := t.eager
	if t.cell.mode == modeGraph {
		measure = t.replay
	}
	samples, err := measure()
	if err != nil {
		return err
	}
	t.samples = append(t.samples, samples...)
	t.runs = append(t.runs, median(samples))
	before := t.wrong
	if err := t.count(); err != nil {
		return err
	}
	all, err := together(&t.session, t.wrong-before)
	t.wrong = before
	for _, wrong := range all {
		t.wrong += wrong
	}
	return err
}

// eager enqueues batches of reductions back to back, each into a window of its own, with events between them. A sample
// is the longest of the ranks' times.
func (t *trial) eager() (samples []float64, err error) {
	p := t.plan
	for done := 0; done < p.iters; {
		n := min(p.batch, p.iters-done)
		if t.next+p.lead+n > len(t.sets) {
			t.next = 0
		}
		first := t.next
		t.next += p.lead + n
		if err := t.reset(first, p.lead+n); err != nil {
			return nil, err
		}
		for i := range p.lead {
			if err := t.comm.AllReduce(t.sets[first+i]); err != nil {
				return nil, err
			}
		}
		marks := []int{0} // reductions before each event
		if err := t.record(0); err != nil {
			return nil, err
		}
		for i := range n {
			if err := t.comm.AllReduce(t.sets[first+p.lead+i]); err != nil {
				return nil, err
			}
			if (i+1)%p.perSample == 0 || i == n-1 {
				if err := t.record(len(marks)); err != nil {
					return nil, err
				}
				marks = append(marks, i+1)
			}
		}
		if err := t.look(first, p.lead+n); err != nil {
			return nil, err
		}
		if err := t.synchronize(); err != nil {
			return nil, err
		}
		for i := 1; i < len(marks); i++ {
			us, err := t.longest(i - 1)
			if err != nil {
				return nil, err
			}
			samples = append(samples, us/float64(marks[i]-marks[i-1]))
		}
		done += n
	}
	return samples, nil
}

func (t *trial) record(i int) error {
	for rank, dev := range t.devices {
		if err := t.driver.Record(dev, t.rig.events[rank][i], t.streams[rank]); err != nil {
			return err
		}
	}
	return nil
}

// longest is the time from event i to the next on the rank where it is longest.
func (t *trial) longest(i int) (us float64, err error) {
	for rank, dev := range t.devices {
		one, err := t.driver.ElapsedMicros(dev, t.rig.events[rank][i], t.rig.events[rank][i+1])
		if err != nil {
			return 0, err
		}
		us = max(us, one)
	}
	return us, nil
}

// replay launches the graph, each launch on fresh windows and checked, without the host waiting in between. A sample is a
// launch's time by its reductions.
func (t *trial) replay() (samples []float64, err error) {
	dev, stream, events := t.devices[0], t.streams[0], t.rig.events[0]
	used := min(t.plan.captured, len(t.sets))
	for done := 0; done < t.plan.launches; {
		n := min(launchesPerBatch, t.plan.launches-done)
		for i := range n {
			if err := t.reset(0, used); err != nil {
				return nil, err
			}
			if err := t.join(t.rig.forks); err != nil {
				return nil, err
			}
			if !t.rig.simulated() { // where enqueueing takes no time on the devices' clock
				if err := t.driver.Load(dev, 1, gateRounds, stream); err != nil {
					return nil, err
				}
			}
			if err := t.level(); err != nil {
				return nil, err
			}
			if err := t.driver.Record(dev, events[2*i], stream); err != nil {
				return nil, err
			}
			if err := t.driver.Launch(dev, t.graph, stream); err != nil {
				return nil, err
			}
			if err := t.driver.Record(dev, events[2*i+1], stream); err != nil {
				return nil, err
			}
			if err := t.fork(t.rig.forks[0]); err != nil {
				return nil, err
			}
			if err := t.look(0, used); err != nil {
				return nil, err
			}
		}
		if err := t.synchronize(); err != nil {
			return nil, err
		}
		for i := range n {
			us, err := t.driver.ElapsedMicros(dev, events[2*i], events[2*i+1])
			if err != nil {
				return nil, err
			}
			samples = append(samples, us/float64(t.plan.captured))
		}
		done += n
	}
	return samples, nil
}

// level lets no rank's stream go on before all ranks have come to it, where they are in several processes: a sample would
// begin with waiting for the others.
func (t *trial) level() error {
	if t.rig.beat == nil {
		return nil
	}
	return t.comm.AllReduce([]allreduce.Buffer{{Send: t.rig.beat[0], Recv: t.rig.beat[0], Count: 1, Type: allreduce.F32, Stream: t.streams[0]}})
}

// compete measures trials in turn, repeat by repeat: A B A B.
func compete(ctx context.Context, trials []*trial, repeats int) error {
	for range repeats {
		for _, t := range trials {
			if err := t.repeat(ctx); err != nil {
				if t.nccl {
					return fmt.Errorf("NCCL: %w", err)
				}
				return err
			}
		}
	}
	return nil
}
