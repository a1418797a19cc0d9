package main

import (
	"fmt"
	"image/color"
	"io"
	"path/filepath"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"

	"gpu.example/allreduce/device"
	"gpu.example/allreduce/internal/atomicfile"
)

// timelineSummary is one reduction, operation by operation. The report carries it without the operations.
type timelineSummary struct {
	Simulated  bool                `json:"simulated"`
	Bytes      int64               `json:"bytes"`
	Type       string              `json:"type"`
	Path       string              `json:"path"`
	Wire       string              `json:"wire"`
	TotalUs    float64             `json:"total_us"`
	Devices    []timelineDevice    `json:"devices"`
	Duplex     float64             `json:"duplex"` // the least of the devices'
	Operations []timelineOperation `json:"operations,omitempty"`
}

// timelineDevice is what one device's link did.
type timelineDevice struct {
	Device int     `json:"device"`
	UpUs   float64 `json:"up_us"`
	DownUs float64 `json:"down_us"`
	BothUs float64 `json:"both_us"`
	Duplex float64 `json:"duplex"` // share of the transfer time with both directions busy
}

type timelineOperation struct {
	Device int     `json:"device"`
	Kind   string  `json:"kind"` // convert, up, down, sum, or another kernel's name
	Start  float64 `json:"start_us"`
	End    float64 `json:"end_us"`
	Bytes  int64   `json:"bytes"`
}

type span struct{ from, to float64 }

// timelineLead is how long a kernel holds every rank's stream back while a traced reduction is enqueued, in the load kernel's
// rounds of a quarter of a microsecond: tracing doubles the host's time, which then would be what is drawn.
const timelineLead = 20000

// writeTimeline traces one eager reduction of the largest size and writes it.
func (r *perfRig) writeTimeline(path string, report *perfReport) error {
	s, bytes := r.ours[0], r.job.Sizes[len(r.job.Sizes)-1]
	t := &trial{side: s, rig: r, cell: cell{bytes: bytes, mode: modeEager}}
	t.before = s.comm.Stats()
	buffers := t.buffers(0)
	reduce := func() error { return firstError(s.comm.AllReduce(buffers), s.synchronize()) }
	for range 2 { // both slots of the copy engines
		if err := reduce(); err != nil {
			return err
		}
	}
	records, err := r.trace(s, reduce)
	if err != nil {
		return err
	}
	t.route = s.comm.RouteFor(buffers[0])
	summary := &timelineSummary{Simulated: r.simulated(), Bytes: bytes, Type: r.job.Type.String(), Wire: t.route.Wire.String()}
	summary.Path, _ = pathTaken(t.route, t.before, s.comm.Stats())
	summary.read(records)
	for i := range summary.Devices {
		d := &summary.Devices[i]
		if i == 0 || d.Duplex < summary.Duplex {
			summary.Duplex = d.Duplex
		}
	}
	brief := *summary
	brief.Operations = nil
	report.Timeline = &brief
	if filepath.Ext(path) == ".json" {
		return writeJSONFile(path, summary)
	}
	return atomicfile.Write(path, summary.draw)
}

// trace records what reduce enqueues, held back until all of it is.
func (r *perfRig) trace(s *side, reduce func() error) ([]device.TraceRecord, error) {
	devices := slices.Compact(slices.Sorted(slices.Values(r.devices)))
	if err := r.driver.TraceStart(devices...); err != nil {
		return nil, err
	}
	err := error(nil)
	for i, dev := range r.devices {
		err = firstError(err, r.driver.Load(dev, 1, timelineLead, s.streams[i]))
	}
	err = firstError(err, reduce())
	records, stopping := r.driver.TraceStop()
	records = slices.DeleteFunc(records, func(t device.TraceRecord) bool { return t.Name == "load" })
	return records, firstError(err, stopping)
}

// read takes over the trace; times count from the first operation.
func (s *timelineSummary) read(records []device.TraceRecord) {
	if len(records) == 0 {
		return
	}
	first, last := records[0].StartMicros, 0.0
	for _, r := range records {
		first, last = min(first, r.StartMicros), max(last, r.EndMicros)
	}
	s.TotalUs = round3(last - first)
	up, down := map[int][]span{}, map[int][]span{}
	for _, r := range records {
		o := timelineOperation{Device: r.Device, Kind: r.Name, Start: r.StartMicros - first, End: r.EndMicros - first, Bytes: r.Bytes}
		switch r.Kind {
		case device.TraceDeviceToHost:
			o.Kind = "up"
			up[r.Device] = append(up[r.Device], span{o.Start, o.End})
		case device.TraceHostToDevice:
			o.Kind = "down"
			down[r.Device] = append(down[r.Device], span{o.Start, o.End})
		}
		o.Start, o.End = round3(o.Start), round3(o.End)
		s.Operations = append(s.Operations, o)
		if !slices.ContainsFunc(s.Devices, func(d timelineDevice) bool { return d.Device == r.Device }) {
			s.Devices = append(s.Devices, timelineDevice{Device: r.Device})
		}
	}
	slices.SortFunc(s.Devices, func(a, b timelineDevice) int { return a.Device - b.Device })
	slices.SortStableFunc(s.Operations, func(a, b timelineOperation) int { return int(1000 * (a.Start - b.Start)) })
	for i := range s.Devices {
		d := &s.Devices[i]
		u, w := busy(up[d.Device]), busy(down[d.Device])
		either := busy(append(slices.Clone(up[d.Device]), down[d.Device]...))
		d.UpUs, d.DownUs, d.BothUs = round3(u), round3(w), round3(u+w-either)
		if either > 0 {
			d.Duplex = round3((u + w - either) / either)
		}
	}
}

// busy is how long at least one of the spans lasts.
func busy(spans []span) (total float64) {
	slices.SortFunc(spans, func(a, b span) int {
		if a.from < b.from {
			return -1
		}
		return 1
	})
	end := -1.0
	for _, s := range spans {
		total += max(0, s.to-max(s.from, end))
		end = max(end, s.to)
	}
	return total
}

// timelineLanes are the lanes of a device from top to bottom; other kernels share the first.
var timelineLanes = []string{"convert", "up", "down", "sum"}

var timelineColors = map[string]color.RGBA{
	"convert": {0x8e, 0x6c, 0x8a, 0xff}, "up": {0x2b, 0x6c, 0xb0, 0xff}, "down": {0xdd, 0x6b, 0x20, 0xff}, "sum": {0x2f, 0x85, 0x5a, 0xff},
}

// bars is a plotter of the operations as boxes.
type bars struct{ *timelineSummary }

// lane gives an operation's row, from the bottom.
func (b bars) lane(o timelineOperation) int {
	at := max(slices.Index(timelineLanes, o.Kind), 0)
	place := slices.IndexFunc(b.Devices, func(d timelineDevice) bool { return d.Device == o.Device })
	return (len(b.Devices)-1-place)*(len(timelineLanes)+1) + len(timelineLanes) - 1 - at
}

func (b bars) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	for _, o := range b.Operations {
		fill, known := timelineColors[o.Kind]
		if !known {
			fill = color.RGBA{0x71, 0x80, 0x96, 0xff}
		}
		lane := float64(b.lane(o))
		points := []vg.Point{{X: x(o.Start), Y: y(lane - 0.4)}, {X: x(o.End), Y: y(lane - 0.4)}, {X: x(o.End), Y: y(lane + 0.4)}, {X: x(o.Start), Y: y(lane + 0.4)}}
		c.FillPolygon(fill, points)
		c.StrokeLines(draw.LineStyle{Color: color.White, Width: 0.5}, append(points, points[0]))
	}
}

func (b bars) DataRange() (xmin, xmax, ymin, ymax float64) {
	return 0, b.TotalUs, -1, float64(len(b.Devices)*(len(timelineLanes)+1)) - 1
}

// draw writes the picture as SVG.
func (s *timelineSummary) draw(w io.Writer) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("%s of %s, %s, wire %s: %.1f us%s", bytesWords(s.Bytes), s.Type, s.Path, s.Wire, s.TotalUs, map[bool]string{true: " SIMULATED"}[s.Simulated])
	for _, d := range s.Devices {
		p.Title.Text += fmt.Sprintf("; device %d duplex %.0f %%", d.Device, 100*d.Duplex)
	}
	p.X.Label.Text = "microseconds"
	plainFonts(p)
	b := bars{s}
	var ticks plot.ConstantTicks
	for _, d := range s.Devices {
		for _, lane := range timelineLanes {
			ticks = append(ticks, plot.Tick{Value: float64(b.lane(timelineOperation{Device: d.Device, Kind: lane})),
				Label: fmt.Sprintf("%d %s", d.Device, lane)})
		}
	}
	p.Y.Tick.Marker = ticks
	grid := plotter.NewGrid()
	grid.Horizontal.Width, grid.Vertical.Color = 0, lightGrey
	p.Add(grid, b)
	return writeSVG(w, 1100, vg.Length(90+28*len(ticks)), [][]*plot.Plot{{p}})
}
