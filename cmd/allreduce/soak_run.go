package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"gpu.example/allreduce/device"
)

const (
	// Calls between two looks at the data; many are in flight then. Emulated devices take milliseconds for a large one.
	batchCalls          = 2048
	batchCallsSimulated = 64
	// Batches between two captures: the graph in a slot is replaced.
	recaptureEvery = 16
	maxReplays     = 4 // of one graph in a row
	idleShare      = 10
)

// soakState is a soak under way.
type soakState struct {
	*soakRig
	report *soakReport
	rng    *rand.Rand // decides what is done, by the seed alone
	naps   *rand.Rand // decides when nothing is
	graphs [graphSlots]*soakGraph
	batch  []soakStep
	napped time.Time // when the last idle gap ended
}

// soakStep is a part of a batch: a burst, or a graph and how often it was launched.
type soakStep struct {
	call    int64 // the first one
	burst   *burst
	graph   *soakGraph
	repeats int
}

// soakAndReport runs the job and prints what came out, also where it could not be finished.
func soakAndReport(ctx context.Context, s streams, f *soakFlags, job *soakJob) error {
	report := newSoakReport(job)
	if silent(job.rank) {
		s.out = io.Discard
	}
	printer := newSoakPrinter(s, !f.asJSON, job)
	err := job.run(ctx, report, printer)
	report.OK = err == nil && report.Finding == nil
	if err != nil {
		report.Error = oneLine(err)
	}
	printer.finish(report)
	return deliver(s, f.asJSON, f.jsonFile, report, report.OK, err)
}

// run opens the devices and soaks. What fails before the first call is an error; what fails later is a finding.
func (j *soakJob) run(ctx context.Context, report *soakReport, printer *soakPrinter) error {
	driver, note, err := pickBackend(j.backend, ranksHere(j.rank, j.ranks), j.devices)
	if err != nil {
		return err
	}
	if note != "" {
		report.Warnings = append(report.Warnings, note)
	}
	emulated := driver.Backend() == device.Emulated
	if j.mutate != "" && !emulated {
		return errors.New("--mutate is for emulated devices; --backend emulated takes them")
	}
	if emulated && j.rank == nil { // processes cannot be stepped
		if err := j.configureMachine(); err != nil {
			return err
		}
	}
	r, err := openSoak(ctx, driver, j)
	defer r.close()
	if err != nil {
		return err
	}
	if err := report.begin(r); err != nil {
		return err
	}
	printer.begin(report)
	defer report.account(r)
	if j.mutate != "" {
		orders := device.Orders()
		device.Mutate(orders[slices.IndexFunc(orders, func(o device.Order) bool { return o.Name == j.mutate })].ID)
		defer device.Mutate(0)
	}
	s := &soakState{soakRig: r, report: report, rng: rand.New(rand.NewPCG(j.seed, 1)), naps: rand.New(rand.NewPCG(j.seed, 2)),
		napped: time.Now()}
	start := time.Now()
	defer func() {
		report.Seconds = round3(time.Since(start).Seconds())
		s.destroyGraphs()
	}()
	for more := j.calls == 0 || report.Calls < j.calls; more; {
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		if err := s.oneBatch(ctx); err != nil {
			return err
		}
		over := time.Since(start) >= j.duration || j.calls > 0 && report.Calls >= j.calls
		if over = s.together(ctx, over); report.Finding != nil {
			return nil
		}
		report.Batches++
		printer.tick(time.Since(start), report)
		more = !over
	}
	return nil
}

// together tells the other processes what this one found, and takes over what they did: the first finding of any rank ends
// the run on all. over is rank 0's, since the processes' clocks are not one.
func (s *soakState) together(ctx context.Context, over bool) bool {
	if s.job.rank == nil || s.comm.Err() != nil { // a failure is found by every rank itself
		return over
	}
	type word struct {
		Over       bool
		Mismatches int64
		Finding    string
		Nap        time.Duration
	}
	mine := word{Over: over, Mismatches: s.report.Mismatches}
	if f := s.report.Finding; f != nil {
		mine.Finding = f.String()[:min(len(f.String()), 1000)]
	}
	if s.job.rank.Rank == 0 {
		mine.Nap = s.gap()
	}
	all, err := gatherJSON(s.session, mine)
	if err != nil {
		s.found(&soakFinding{Kind: findingFailure, Call: s.report.Calls, Text: oneLine(err)})
		return true
	}
	for rank, theirs := range all {
		if theirs.Finding != "" && rank != s.job.rank.Rank {
			s.report.Mismatches = max(s.report.Mismatches, theirs.Mismatches)
			s.found(&soakFinding{Kind: findingPeer, Call: s.report.Calls, Rank: rank, Text: theirs.Finding})
		}
	}
	s.rest(ctx, all[0].Nap)
	return all[0].Over
}

// oneBatch enqueues many calls, waits once and checks them all. It fails with what is no finding: no memory.
func (s *soakState) oneBatch(ctx context.Context) error {
	s.batch = s.batch[:0]
	err := s.enqueueBatch(ctx)
	if waited := s.synchronize(); err == nil {
		err = waited
	}
	if s.simulated() {
		s.report.Hazards = device.Hazards()
		if text := device.Report(); s.report.Hazards > 0 || text != "" && err == nil {
			s.found(&soakFinding{Kind: findingHazard, Call: s.report.Calls, Report: text})
		}
	}
	switch {
	case errors.Is(err, device.ErrAlloc):
		return err
	case errors.Is(err, device.ErrHazard): // every call fails with the hazard that was found
		return nil
	case err != nil:
		f := &soakFinding{Kind: findingFailure, Call: s.report.Calls, Text: oneLine(err)}
		if s.simulated() {
			f.Report = device.Report()
		}
		s.found(f)
		return nil
	}
	wrong, err := s.wrongElements()
	if err == nil && wrong > 0 {
		err = s.locate(wrong)
	}
	if err != nil {
		s.found(&soakFinding{Kind: findingFailure, Call: s.report.Calls, Text: oneLine(err)})
	}
	return nil
}

// enqueueBatch draws what to do until the batch or the memory for its results is full.
func (s *soakState) enqueueBatch(ctx context.Context) error {
	if s.simulated() && s.report.Batches%recaptureEvery == 0 {
		if err := s.rewrite(); err != nil {
			return err
		}
	}
	if s.job.graph && s.report.Batches%recaptureEvery == 0 {
		if err := s.recapture(int(s.report.Batches/recaptureEvery) % graphSlots); err != nil {
			return err
		}
	}
	limit := int64(batchCalls)
	if s.simulated() {
		limit = batchCallsSimulated
	}
	nap := s.rng.Int64N(limit) // where in the batch an idle gap may be; what is in flight ends in it
	var used int64
	for calls := int64(0); calls < limit; {
		before := calls
		g := s.graphs[s.rng.IntN(graphSlots)]
		if g != nil && (!s.job.eager || s.rng.IntN(3) == 0) {
			repeats := 1 + s.rng.IntN(maxReplays)
			for range repeats {
				if err := s.launch(g); err != nil {
					return err
				}
			}
			s.batch = append(s.batch, soakStep{call: s.report.Calls, graph: g, repeats: repeats})
			s.report.countGraph(g, repeats)
			calls += g.calls * int64(repeats)
		} else if s.job.eager {
			b, fits := s.draw(s.rng, used, s.space-used)
			if !fits {
				return nil
			}
			used += b.used()
			if err := s.enqueue(&b); err != nil {
				return err
			}
			s.batch = append(s.batch, soakStep{call: s.report.Calls, burst: &b})
			s.report.countBurst(&b)
			calls += int64(b.n)
		} else {
			calls++ // an empty slot
		}
		if calls == before {
			calls++ // a graph of nothing
		}
		if before <= nap && nap < calls {
			s.nap(ctx)
		}
	}
	return nil
}

// nap leaves the devices idle for a while, in about a tenth of the time. It changes nothing of what is done. Several
// processes rest together, between batches, or some would wait for the others.
func (s *soakState) nap(ctx context.Context) {
	if s.job.rank == nil {
		s.rest(ctx, s.gap())
	}
}

// gap is how long the devices shall be idle now.
func (s *soakState) gap() time.Duration {
	if s.job.idle == 0 || time.Since(s.napped) < s.job.idle/2*(idleShare-1) {
		return 0
	}
	return s.job.idle/10 + time.Duration(s.naps.Float64()*0.9*float64(s.job.idle))
}

func (s *soakState) rest(ctx context.Context, gap time.Duration) {
	if gap == 0 {
		return
	}
	select {
	case <-time.After(gap):
		s.report.IdleGaps++
		s.report.IdleSeconds = round3(s.report.IdleSeconds + gap.Seconds())
	case <-ctx.Done():
	}
	s.napped = time.Now()
}

// recapture puts a new graph into a slot; nothing is in flight. The first time it fills every slot.
func (s *soakState) recapture(slot int) error {
	for i := range s.graphs {
		if i != slot && s.graphs[i] != nil {
			continue
		}
		if old := s.graphs[i]; old != nil {
			s.graphs[i] = nil
			if err := s.driver.DestroyGraph(s.devices[0], old.handle); err != nil {
				return err
			}
		}
		g, err := s.capture(s.rng, i)
		if err != nil {
			return fmt.Errorf("capturing: %w", err)
		}
		s.graphs[i] = g
		s.report.Graphs++
	}
	return nil
}

func (s *soakState) destroyGraphs() {
	for _, g := range s.graphs {
		if g != nil {
			_ = s.driver.DestroyGraph(s.devices[0], g.handle)
		}
	}
}

// locate finds the wrong calls of a batch, whose comparisons counted wrong elements.
func (s *soakState) locate(wrong int64) error {
	var first *soakFinding
	for _, step := range s.batch {
		bursts, call := []burst(nil), step.call
		if step.burst != nil {
			bursts = []burst{*step.burst}
		} else {
			bursts = step.graph.bursts
			call += int64(step.repeats-1) * step.graph.calls // what an earlier replay left is overwritten
		}
		for i := range bursts {
			b := &bursts[i]
			calls, found, equal, err := s.inspect(b)
			if err != nil {
				return err
			}
			s.report.Mismatches += calls
			s.report.row(b).Mismatches += calls
			if !equal {
				s.report.row(b).RanksEqual = false
			}
			if found != nil && first == nil {
				first = found
				first.Call += call
				if step.graph != nil {
					first.Mode = modeGraph
				}
			}
			call += int64(b.n)
		}
	}
	if first == nil { // a replay that was followed by another one of the same graph
		s.report.Mismatches++
		first = &soakFinding{Kind: findingMismatch, Call: s.batch[0].call, Mode: modeGraph, Element: -1, Wrong: wrong,
			Text: "in a replay of this batch, whose results a later replay of the same graph has overwritten; call is the batch's first"}
	}
	s.found(first)
	return nil
}

// found keeps the first finding; a hazard is named before the mismatch it may have caused, but both belong together.
func (s *soakState) found(f *soakFinding) {
	if s.report.Finding != nil {
		s.report.Also = append(s.report.Also, f.String())
		return
	}
	f.Batch, f.Seed, f.Mutate = s.report.Batches, s.job.seed, s.job.mutate
	f.Command = strings.Join(append(slices.Clone(s.job.command), fmt.Sprintf("--calls=%d", s.report.Calls)), " ")
	f.Schedule = s.report.Schedule
	s.report.Finding = f
}
