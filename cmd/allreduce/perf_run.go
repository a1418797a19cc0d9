package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"gpu.example/allreduce"
	"gpu.example/allreduce/device"
)

const defaultSettings = "default"

// perfAndReport runs the job and writes what came out, also where it could not be finished.
func perfAndReport(ctx context.Context, s streams, f *perfFlags, job *perfJob) error {
	var baseline *perfReport
	if f.baseline != "" {
		var err error
		if baseline, err = readBaseline(f.baseline); err != nil {
			return err
		}
	}
	report := newPerfReport(job)
	if silent(job.rank) {
		s.out = io.Discard
	}
	printer := newPerfPrinter(s, f, job)
	start := time.Now()
	err := job.run(ctx, f, report, printer)
	report.Seconds = round3(time.Since(start).Seconds())
	report.total()
	if err == nil && baseline != nil {
		report.Baseline, err = compareBaseline(f, baseline, report)
	}
	report.OK = err == nil && report.right() && (report.Baseline == nil || report.Baseline.Worse == 0)
	if err != nil {
		report.Error = oneLine(err)
	}
	printer.finish(report)
	if len(report.Results) > 0 {
		if f.csvFile != "" {
			err = errors.Join(err, writePerfCSV(f.csvFile, report))
		}
		if f.plotFile != "" {
			err = errors.Join(err, writePerfPlot(f.plotFile, report))
		}
	}
	return deliver(s, f.asJSON, f.jsonFile, report, report.OK, err)
}

// right says whether no element was wrong, NCCL's included.
func (r *perfReport) right() bool {
	return r.Wrong == 0 && !slices.ContainsFunc(r.Results, func(row perfRow) bool {
		return slices.ContainsFunc(row.NCCL, func(n ncclRow) bool { return n.Times.Wrong > 0 })
	})
}

// run measures everything that was asked for; the report holds whatever was done when it fails.
func (j *perfJob) run(ctx context.Context, f *perfFlags, report *perfReport, printer *perfPrinter) error {
	if err := emulateMachine(j.Emulate, driveOf(j.rank)); err != nil {
		return err
	}
	driver, note, err := pickBackend(j.Backend, ranksHere(j.rank, j.Ranks), j.Devices)
	if err != nil {
		return err
	}
	if note != "" {
		report.warn(note)
	}
	if j.Repeats == 0 {
		if j.Repeats = repeatsCUDA; driver.Backend() == device.Emulated {
			j.Repeats = repeatsEmulated
		}
	}
	report.Repeats = j.Repeats
	rig, err := openRig(ctx, driver, j, j.Libraries[0])
	if err != nil {
		return err
	}
	defer rig.close()
	if err := report.describe(rig.session); err != nil {
		return err
	}
	if j.VsNCCL { // that it cannot be had is known before anything is measured
		s, err := rig.ncclSide(rig.wire(rig.ours[0], j.Sizes[0]))
		if err != nil {
			return fmt.Errorf("--vs nccl: %w", err)
		}
		report.NCCL = append(report.NCCL, perfLibrary{Library: rig.library, Version: s.name})
	}
	printer.begin(report)
	if err := rig.measureSizes(ctx, report, printer); err != nil {
		return err
	}
	if len(j.Overlap) > 0 {
		if err := rig.measureOverlap(ctx, report, printer, defaultSettings); err != nil {
			return fmt.Errorf("--overlap: %w", err)
		}
	}
	if f.timeline != "" {
		if err := rig.writeTimeline(f.timeline, report); err != nil {
			return fmt.Errorf("--timeline: %w", err)
		}
	}
	report.account(rig)
	rig.close() // the children want the memory
	if j.VsNCCL {
		return j.runChildren(ctx, f, report, printer)
	}
	return nil
}

// wire is what would travel on a side.
func (r *perfRig) wire(s *side, bytes int64) allreduce.Type {
	if route := s.comm.Route(bytes, r.job.Type, r.job.Op); route.Wire != allreduce.TypeNone {
		return route.Wire
	}
	return r.job.Type
}

// measureSizes makes the rows of every size, mode and variant.
func (r *perfRig) measureSizes(ctx context.Context, report *perfReport, printer *perfPrinter) error {
	var bounds *bounder
	if r.job.Bound && r.job.Ranks > 1 {
		var err error
		if bounds, err = r.newBounder(); err != nil {
			return err
		}
	}
	for _, bytes := range r.job.Sizes {
		for _, mode := range r.job.Modes {
			rows, err := r.measureCell(ctx, bytes, mode)
			if err != nil {
				return fmt.Errorf("%d bytes, %s: %w", bytes, mode, err)
			}
			for i := range rows {
				row := &rows[i]
				if bounds != nil {
					if wire, err := allreduce.ParseType(row.Wire); err == nil {
						if err := bounds.bound(ctx, row, wire); err != nil {
							return err
						}
					}
				}
				row.choose()
				report.Results = append(report.Results, *row)
				printer.row(row)
			}
		}
	}
	return nil
}

// measureCell makes the rows of one size and mode: variants whose wires are equal compete with each other and with NCCL.
func (r *perfRig) measureCell(ctx context.Context, bytes int64, mode string) ([]perfRow, error) {
	c := cell{bytes: bytes, mode: mode}
	rows := make([]perfRow, len(r.ours))
	groups := r.byWire(bytes)
	for _, wire := range slices.Sorted(maps.Keys(groups)) { // all processes in the same order
		members := groups[wire]
		list := slices.Clone(members.sides)
		if r.job.VsNCCL {
			s, err := r.ncclSide(allreduce.Type(wire))
			if err != nil {
				return nil, err
			}
			list = append(list, s)
		}
		trials, err := r.measure(ctx, list, c, r.job.Repeats)
		if err != nil {
			return nil, err
		}
		for i, at := range members.at {
			rows[at] = trials[i].row()
			for _, t := range trials[len(members.at):] {
				rows[at].NCCL = append(rows[at].NCCL, t.against(trials[i], r.library, defaultSettings))
			}
		}
	}
	if !r.job.InPlace {
		return rows, nil
	}
	repeats := r.job.Repeats
	if r.job.VsNCCL {
		repeats = 1 // nothing to compare with
	}
	c.inPlace = true
	trials, err := r.measure(ctx, r.ours, c, repeats)
	if err != nil {
		return nil, err
	}
	for i, t := range trials {
		times := t.times()
		rows[i].InPlace = &times
		rows[i].Wrong += t.wrong
	}
	return rows, nil
}

// wireGroup are the variants of one wire, and their places among all.
type wireGroup struct {
	sides []*side
	at    []int
}

// byWire groups our variants by what travels; the index is the wire's type.
func (r *perfRig) byWire(bytes int64) map[int]wireGroup {
	groups := map[int]wireGroup{}
	for i, s := range r.ours {
		wire := int(r.wire(s, bytes))
		g := groups[wire]
		groups[wire] = wireGroup{append(g.sides, s), append(g.at, i)}
	}
	return groups
}

// measure lets sides compete in a cell.
func (r *perfRig) measure(ctx context.Context, sides []*side, c cell, repeats int) (trials []*trial, err error) {
	defer func() {
		for _, t := range trials {
			_ = t.synchronize() // after a failure something may still be on its way
			t.close()
		}
	}()
	for _, s := range sides {
		t, err := r.newTrial(ctx, s, c)
		if t != nil {
			trials = append(trials, t)
		}
		if err != nil {
			if s.nccl {
				err = fmt.Errorf("NCCL: %w", err)
			}
			return nil, err
		}
	}
	return trials, compete(ctx, trials, repeats)
}
