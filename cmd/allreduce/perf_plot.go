package main

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"gpu.example/allreduce"
	"gpu.example/allreduce/internal/atomicfile"
)

// writePerfPlot draws time and bus bandwidth, us against NCCL, as SVG or as a page with the table below it.
func writePerfPlot(path string, r *perfReport) error {
	return atomicfile.Write(path, func(w io.Writer) error {
		if filepath.Ext(path) == ".svg" {
			return drawPerf(w, r)
		}
		return writePerfPage(w, r)
	})
}

// writeSVG draws plots in a grid, width and height in points each.
func writeSVG(w io.Writer, width, height vg.Length, plots [][]*plot.Plot) error {
	canvas := vgsvg.New(width*vg.Length(len(plots[0])), height*vg.Length(len(plots)))
	dc := draw.New(canvas)
	dc.FillPolygon(color.White, []vg.Point{dc.Min, {X: dc.Max.X, Y: dc.Min.Y}, dc.Max, {X: dc.Min.X, Y: dc.Max.Y}})
	tiles := draw.Tiles{Rows: len(plots), Cols: len(plots[0]), PadTop: 8, PadBottom: 8, PadLeft: 8, PadRight: 14, PadX: 18, PadY: 12}
	for i, row := range plot.Align(plots, tiles, dc) {
		for k, c := range row {
			if plots[i][k] != nil {
				plots[i][k].Draw(c)
			}
		}
	}
	_, err := canvas.WriteTo(w)
	return err
}

// perfSeries is one line of a picture.
type perfSeries struct {
	name    string
	color   color.RGBA
	dashes  []vg.Length
	width   vg.Length
	markers bool
	time    func(*perfRow) float64 // microseconds; 0: no point
}

var (
	modeColors = map[string]color.RGBA{modeEager: {0x2b, 0x6c, 0xb0, 0xff}, modeGraph: {0xdd, 0x6b, 0x20, 0xff}}
	grey       = color.RGBA{0x71, 0x80, 0x96, 0xff}
	lightGrey  = color.RGBA{0xe2, 0xe8, 0xf0, 0xff}
)

// drawPerf draws a column of plots for each variant.
func drawPerf(w io.Writer, r *perfReport) error {
	var variants []variant
	var modes []string
	for _, row := range r.Results {
		if !slices.Contains(variants, row.Asked) {
			variants = append(variants, row.Asked)
		}
		if !slices.Contains(modes, row.Mode) {
			modes = append(modes, row.Mode)
		}
	}
	compared := slices.ContainsFunc(r.Results, func(row perfRow) bool { return row.Ratio > 0 })
	grid := make([][]*plot.Plot, 2)
	if compared {
		grid = make([][]*plot.Plot, 3)
	}
	for _, v := range variants {
		var rows []*perfRow
		for i := range r.Results {
			if r.Results[i].Asked == v {
				rows = append(rows, &r.Results[i])
			}
		}
		title := fmt.Sprintf("%s of %s, %d ranks, %s", r.Op, r.Type, r.Ranks, r.Card)
		if text := v.String(); text != "" {
			title += ", " + text
		}
		if r.Simulated {
			title += " (SIMULATED)"
		}
		series := allSeries(modes, compared)
		time := newPerfPlot(title, "microseconds", true)
		bandwidth := newPerfPlot("", "bus bandwidth, GB/s", true)
		factor := busFactor(r.Ranks)
		for _, s := range series {
			if err := s.add(time, rows, func(_ *perfRow, us float64) float64 { return us }); err != nil {
				return err
			}
			if err := s.add(bandwidth, rows, func(row *perfRow, us float64) float64 { return float64(row.Bytes) / us / 1e3 * factor }); err != nil {
				return err
			}
		}
		bandwidth.Legend = plot.NewLegend()
		spread(&time.Y, &bandwidth.Y)
		grid[0], grid[1] = append(grid[0], time), append(grid[1], bandwidth)
		if compared {
			ratio, err := ratioPlot(modes, rows)
			if err != nil {
				return err
			}
			grid[2] = append(grid[2], ratio)
		}
	}
	for _, row := range grid {
		for _, p := range row {
			spread(&p.X)
		}
	}
	return writeSVG(w, 620, 330, grid)
}

func allSeries(modes []string, compared bool) []perfSeries {
	var list []perfSeries
	for _, mode := range modes {
		of := func(get func(*perfRow) float64) func(*perfRow) float64 {
			return func(row *perfRow) float64 {
				if row.Mode != mode {
					return 0
				}
				return get(row)
			}
		}
		c := modeColors[mode]
		list = append(list, perfSeries{name: "ours, " + mode, color: c, width: 2, markers: true,
			time: of(func(row *perfRow) float64 { return row.Ours.Median })})
		if compared {
			// NCCL's time beside ours: its own may come from another process.
			list = append(list, perfSeries{name: "NCCL best, " + mode, color: c, width: 1.5, dashes: []vg.Length{6, 4},
				time: of(func(row *perfRow) float64 { return row.Ratio * row.Ours.Median })},
				perfSeries{name: "NCCL default, " + mode, color: c, width: 1, dashes: []vg.Length{1, 3},
					time: of(func(row *perfRow) float64 { return row.RatioDefault * row.Ours.Median })})
		}
	}
	return append(list, perfSeries{name: "bound (bare copies)", color: grey, width: 1, dashes: []vg.Length{8, 3, 2, 3},
		time: func(row *perfRow) float64 {
			if row.Mode != modes[0] {
				return 0
			}
			return row.BoundUs
		}})
}

// add draws the series' points that exist.
func (s perfSeries) add(p *plot.Plot, rows []*perfRow, value func(*perfRow, float64) float64) error {
	var points plotter.XYs
	for _, row := range rows {
		if us := s.time(row); us > 0 && row.Bytes > 0 {
			points = append(points, plotter.XY{X: float64(row.Bytes), Y: value(row, us)})
		}
	}
	if len(points) == 0 {
		return nil
	}
	line, dots, err := plotter.NewLinePoints(points)
	if err != nil {
		return err
	}
	line.LineStyle = draw.LineStyle{Color: s.color, Width: s.width, Dashes: s.dashes}
	dots.GlyphStyle = draw.GlyphStyle{Color: s.color, Radius: 2.2, Shape: draw.CircleGlyph{}}
	p.Add(line)
	p.Legend.Add(s.name, line)
	if s.markers || len(points) == 1 {
		p.Add(dots)
	}
	return nil
}

func newPerfPlot(title, y string, logarithmic bool) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.X.Label.Text, p.Y.Label.Text = "payload per rank, bytes", y
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, byteTicks{}
	if logarithmic {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	p.Legend.Top, p.Legend.Left = true, true
	p.Legend.XOffs, p.Legend.YOffs, p.Legend.Padding = 6, -4, 2
	plainFonts(p)
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Color = lightGrey, lightGrey
	p.Add(grid)
	return p
}

// spread gives a logarithmic axis a range where there is one point or none.
func spread(axes ...*plot.Axis) {
	for _, a := range axes {
		if !(a.Min > 0 && a.Max < math.Inf(1)) {
			a.Min, a.Max = 1, 1
		}
		if a.Min >= a.Max {
			a.Min, a.Max = a.Min/2, a.Max*2
		}
	}
}

func plainFonts(p *plot.Plot) {
	for _, style := range []*draw.TextStyle{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label,
		&p.Legend.TextStyle} {
		style.Font.Variant = "Sans"
	}
	p.Title.TextStyle.Font.Size = 11
	p.Title.Padding = 6
	p.Legend.TextStyle.Font.Size = 9
}

// ratioPlot draws NCCL's time by ours.
func ratioPlot(modes []string, rows []*perfRow) (*plot.Plot, error) {
	p := newPerfPlot("", "NCCL's time / ours", false)
	p.Legend.Top, p.Legend.YOffs = false, 4
	if len(rows) > 0 {
		parity := plotter.NewFunction(func(float64) float64 { return 1 })
		parity.Color = grey
		p.Add(parity)
	}
	p.Y.Min = 0
	for _, mode := range modes {
		for _, s := range []perfSeries{
			{name: "NCCL best, " + mode, color: modeColors[mode], width: 2, markers: true, time: func(row *perfRow) float64 { return row.Ratio }},
			{name: "NCCL default, " + mode, color: modeColors[mode], width: 1, dashes: []vg.Length{1, 3}, time: func(row *perfRow) float64 { return row.RatioDefault }},
		} {
			get := s.time
			s.time = func(row *perfRow) float64 {
				if row.Mode != mode {
					return 0
				}
				return get(row)
			}
			if err := s.add(p, rows, func(_ *perfRow, ratio float64) float64 { return ratio }); err != nil {
				return nil, err
			}
		}
	}
	p.Y.Min = 0
	return p, nil
}

// byteTicks marks powers of two with K, M and G; every second or fourth where there are many.
type byteTicks struct{}

func (byteTicks) Ticks(low, high float64) (ticks []plot.Tick) {
	var powers []float64
	for x := 1.0; x <= high*1.0001; x *= 2 {
		if x >= low*0.9999 {
			powers = append(powers, x)
		}
	}
	every := (len(powers) + 9) / 10
	for i, x := range powers {
		t := plot.Tick{Value: x}
		if i%max(every, 1) == 0 {
			t.Label = allreduce.FormatBytes(int64(x))
		}
		ticks = append(ticks, t)
	}
	if len(ticks) == 0 {
		ticks = []plot.Tick{{Value: low, Label: fmt.Sprint(int64(low))}}
	}
	return ticks
}

var perfPage = template.Must(template.New("perf").Parse(`<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>allreduce perf, {{.Report.Card}}</title>
<style>body{font:14px/1.4 system-ui,sans-serif;margin:2em;color:#1a202c}svg{max-width:100%;height:auto}
table{border-collapse:collapse;margin:1em 0}th,td{padding:.2em .7em;text-align:right;border-bottom:1px solid #e2e8f0}
th{background:#f7fafc;position:sticky;top:0}.l{text-align:left}.bad{color:#c53030;font-weight:bold}</style></head><body>
<h1>allreduce perf: {{.Report.Card}}, {{.Report.Ranks}} ranks</h1>
{{if .Report.Simulated}}<p class="bad">SIMULATED: the times are those of a model of PCIe links, not measured on any hardware.</p>{{end}}
<p>{{.Report.Date}}, allreduce {{.Report.Version}}{{with .Report.Driver}}, driver {{.}}{{end}}{{range .Report.NCCL}}, NCCL {{.Version}}{{end}}<br><code>{{.Command}}</code></p>
{{.Picture}}
<table><tr><th>bytes</th><th class="l">asked</th><th class="l">mode</th><th class="l">path</th><th class="l">wire</th><th>min us</th><th>median us</th><th>p90</th><th>p99</th><th>busbw GB/s</th><th>wrong</th><th>NCCL us</th><th>ratio</th><th class="l">NCCL's best</th><th>bound us</th><th>% of bound</th></tr>
{{range .Report.Results}}<tr><td>{{.Bytes}}</td><td class="l">{{.Asked}}</td><td class="l">{{.Mode}}</td><td class="l">{{.Path}}</td><td class="l">{{.Wire}}</td><td>{{.Ours.Min}}</td><td>{{.Ours.Median}}</td><td>{{.Ours.P90}}</td><td>{{.Ours.P99}}</td><td>{{.Ours.BusbwGBs}}</td><td{{if .Wrong}} class="bad"{{end}}>{{.Wrong}}</td>{{with .NCCLBest}}<td>{{.Times.Median}}</td>{{else}}<td></td>{{end}}<td>{{if .Ratio}}{{.Ratio}}{{end}}</td><td class="l">{{with .NCCLBest}}{{.Version}} {{.Settings}}{{end}}</td><td>{{if .BoundUs}}{{.BoundUs}}{{end}}</td><td>{{if .PercentOfBound}}{{.PercentOfBound}}{{end}}</td></tr>
{{end}}</table></body></html>
`))

func writePerfPage(w io.Writer, r *perfReport) error {
	var picture bytes.Buffer
	if err := drawPerf(&picture, r); err != nil {
		return err
	}
	svg := picture.String()
	if at := strings.Index(svg, "<svg"); at > 0 { // without the XML declaration
		svg = svg[at:]
	}
	return perfPage.Execute(w, map[string]any{"Report": r, "Picture": template.HTML(svg), "Command": strings.Join(r.Command, " ")})
}
