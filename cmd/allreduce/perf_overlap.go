package main

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"gpu.example/allreduce/device"
)

// overlapRow is how much longer a row of compute kernels takes beside reductions.
type overlapRow struct {
	Beside      string  `json:"beside"` // "nothing", "ours" or "nccl"
	Asked       variant `json:"asked"`
	Version     string  `json:"nccl_version"`
	Settings    string  `json:"nccl_settings"`
	Path        string  `json:"path"`
	Wire        string  `json:"wire"`
	Bytes       int64   `json:"bytes"` // payload of the reductions
	BlocksPerSM float64 `json:"blocks_per_sm"`
	Blocks      int     `json:"blocks"`
	Kernels     int     `json:"kernels"` // in the row
	AloneUs     float64 `json:"alone_us"`
	Us          float64 `json:"time_us"`
	Slowdown    float64 `json:"slowdown"`     // time / alone: 1 is none
	ReductionUs float64 `json:"reduction_us"` // a reduction beside the kernels, from their number
}

const (
	overlapKernels = 20
	overlapRepeats = 5
	overlapTarget  = 48.0 // microseconds of one kernel, one block per SM
	overlapQueue   = 3    // reductions in flight: there is always one running
)

var overlapGrids = []float64{1, 1.5, 2}

// overlap is the compute side: a stream and a captured row of kernels on each device.
type overlap struct {
	*perfRig
	distinct []int // the devices, each once
	sms      []int
	streams  []device.Stream
	events   [][2]device.Event
	rounds   int64
}

// measureOverlap adds rows to the report: the kernels alone, beside each of our variants, and beside NCCL. In a child only
// NCCL is wanted: settings are its own.
func (r *perfRig) measureOverlap(ctx context.Context, report *perfReport, printer *perfPrinter, settings string) error {
	o := &overlap{perfRig: r}
	if err := o.open(); err != nil {
		return err
	}
	if err := o.calibrate(ctx); err != nil {
		return err
	}
	add := func(row overlapRow) {
		report.Overlap = append(report.Overlap, row)
		if printer != nil {
			printer.overlap(row)
		}
	}
	for _, grid := range overlapGrids {
		row := overlapRow{Beside: "nothing", BlocksPerSM: grid, Kernels: overlapKernels, Blocks: o.blocks(0, grid)}
		graphs, err := o.capture(grid)
		if err != nil {
			return err
		}
		err = func() error {
			alone, err := o.times(ctx, graphs)
			if err != nil {
				return err
			}
			row.AloneUs = round3(median(alone))
			row.Us, row.Slowdown = row.AloneUs, 1
			inChild := printer == nil
			if !inChild {
				add(row)
			}
			for _, bytes := range r.job.Overlap {
				var sides []*side
				if !inChild {
					sides = append(sides, r.ours...)
				}
				if r.job.VsNCCL {
					s, err := r.ncclSide(r.wire(r.ours[0], bytes))
					if err != nil {
						return err
					}
					sides = append(sides, s)
				}
				for _, s := range sides {
					beside, err := o.beside(ctx, s, bytes, graphs, row)
					if err != nil {
						return err
					}
					if s.nccl {
						beside.Settings = settings
					}
					add(beside)
				}
			}
			return nil
		}()
		for i, graph := range graphs {
			_ = r.driver.DestroyGraph(o.distinct[i], graph)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *overlap) open() error {
	seen := map[int]bool{}
	for _, dev := range o.devices {
		if seen[dev] {
			continue
		}
		seen[dev] = true
		info, err := o.driver.Info(dev)
		if err != nil {
			return err
		}
		stream, err := o.driver.NewStream(dev)
		if err != nil {
			return err
		}
		o.later(func() { _ = o.driver.DestroyStream(dev, stream) })
		events, err := o.newEvents(dev, 2)
		if err != nil {
			return err
		}
		o.distinct, o.sms, o.streams = append(o.distinct, dev), append(o.sms, info.SMs), append(o.streams, stream)
		o.events = append(o.events, [2]device.Event{events[0], events[1]})
	}
	return nil
}

func (o *overlap) blocks(i int, grid float64) int { return int(math.Round(float64(o.sms[i]) * grid)) }

// calibrate finds how many rounds give a kernel the time wanted.
func (o *overlap) calibrate(ctx context.Context) error {
	o.rounds = 2000
	graphs, err := o.capture(1)
	if err != nil {
		return err
	}
	alone, err := o.times(ctx, graphs)
	for i, graph := range graphs {
		_ = o.driver.DestroyGraph(o.distinct[i], graph)
	}
	if err != nil {
		return err
	}
	each := median(alone) / overlapKernels
	o.rounds = max(1, int64(float64(o.rounds)*overlapTarget/each))
	return nil
}

// capture makes a graph of the row of kernels for each device: one launch, so that the host is in nobody's way.
func (o *overlap) capture(grid float64) (graphs []device.Graph, err error) {
	for i, dev := range o.distinct {
		if err := o.driver.BeginCapture(dev, o.streams[i]); err != nil {
			return nil, err
		}
		for range overlapKernels {
			if err == nil {
				err = o.driver.Load(dev, o.blocks(i, grid), o.rounds, o.streams[i])
			}
		}
		graph, ending := o.driver.EndCapture(dev, o.streams[i])
		if err := firstError(err, ending); err != nil {
			return nil, err
		}
		graphs = append(graphs, graph)
	}
	return graphs, nil
}

// times runs the row on all devices, again and again; a sample is the longest of the devices' times.
func (o *overlap) times(ctx context.Context, graphs []device.Graph) (samples []float64, err error) {
	repeats := overlapRepeats
	if o.simulated() {
		repeats = 1
	}
	for repeat := range repeats + 1 {
		if err := interrupted(ctx); err != nil {
			return nil, err
		}
		for i, dev := range o.distinct {
			err := o.driver.Record(dev, o.events[i][0], o.streams[i])
			if err == nil {
				err = o.driver.Launch(dev, graphs[i], o.streams[i])
			}
			if err == nil {
				err = o.driver.Record(dev, o.events[i][1], o.streams[i])
			}
			if err != nil {
				return nil, err
			}
		}
		longest := 0.0
		for i, dev := range o.distinct {
			if err := o.driver.Synchronize(dev, o.streams[i]); err != nil {
				return nil, err
			}
			us, err := o.driver.ElapsedMicros(dev, o.events[i][0], o.events[i][1])
			if err != nil {
				return nil, err
			}
			longest = max(longest, us)
		}
		if repeat > 0 { // the first one uploads the graph
			samples = append(samples, longest)
		}
	}
	return samples, nil
}

// beside measures the row while a side reduces without a pause.
func (o *overlap) beside(ctx context.Context, s *side, bytes int64, graphs []device.Graph, row overlapRow) (overlapRow, error) {
	t, err := o.newTrial(ctx, s, cell{bytes: bytes, mode: modeEager})
	if err != nil {
		return row, err
	}
	before := s.comm.Stats()
	events, err := o.newEvents(o.devices[0], overlapQueue)
	if err != nil {
		return row, err
	}
	reducer := &reducer{trial: t, events: events, started: make(chan struct{})}
	var group sync.WaitGroup
	group.Go(reducer.run)
	<-reducer.started
	from := reducer.done.Load()
	start := time.Now()
	samples, err := o.times(ctx, graphs)
	elapsed, reductions := time.Since(start), reducer.done.Load()-from
	reducer.stop.Store(true)
	group.Wait()
	if err := firstError(reducer.err, err, t.synchronize()); err != nil {
		return row, fmt.Errorf("%s: %w", row.Beside, err)
	}
	row.Beside, row.Asked, row.Bytes, row.Wire = "ours", s.variant, bytes, t.route.Wire.String()
	row.Path, _ = pathTaken(t.route, before, s.comm.Stats())
	if s.nccl {
		row.Beside, row.Version = "nccl", s.name
	}
	us := median(samples)
	row.Slowdown = round3(us / row.AloneUs)
	row.Us = round3(us)
	if reductions > 0 && !o.simulated() {
		row.ReductionUs = round3(float64(elapsed.Nanoseconds()) / 1e3 / float64(reductions))
	}
	return row, nil
}

// reducer keeps a few reductions in flight until it is told to stop.
type reducer struct {
	*trial
	events  []device.Event
	started chan struct{} // closed when the first reductions have ended
	done    atomic.Int64
	stop    atomic.Bool
	err     error
}

func (r *reducer) run() {
	dev, stream := r.devices[0], r.streams[0]
	signalled := false
	defer func() {
		if !signalled {
			close(r.started)
		}
	}()
	for i := 0; !r.stop.Load(); i++ {
		event := r.events[i%len(r.events)]
		if i >= len(r.events) {
			if r.err = r.driver.SynchronizeEvent(dev, event); r.err != nil {
				return
			}
			r.done.Add(1)
			if !signalled {
				close(r.started)
				signalled = true
			}
		}
		if r.err = r.comm.AllReduce(r.sets[i%len(r.sets)]); r.err != nil {
			return
		}
		if r.err = r.driver.Record(dev, event, stream); r.err != nil {
			return
		}
	}
}

// label is what a row stands beside, for people.
func (o overlapRow) label() string {
	switch o.Beside {
	case "ours":
		text := "us, " + o.Path
		if asked := o.Asked.String(); asked != "" {
			text += " (" + asked + ")"
		}
		return text
	case "nccl":
		text := "NCCL " + o.Version
		if o.Settings != defaultSettings {
			text += " " + o.Settings
		}
		return text
	}
	return "alone"
}
