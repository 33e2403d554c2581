//! The results as a table, as JSON and as a chart.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use eagle_verify::TokenId;
use plotters::prelude::*;
use serde::Serialize;

use super::serve::Run;

/// A mode's figures. Milliseconds are means over its verify (or decode) steps.
#[derive(Debug, Serialize)]
pub struct ModeReport {
    pub mode: String,
    /// Output tokens over all time, prompts included.
    pub tokens_per_s: f64,
    pub ratio_to_plain: f64,
    /// Mean tokens emitted by a request in a verify step, the bonus token included.
    pub acceptance_length: f64,
    /// The share of verify steps that confirmed a draft at depth 1, 2, ...
    pub rate_at_depth: Vec<f64>,
    /// The target's forward pass.
    pub verify_ms: f64,
    /// The draft model.
    pub draft_ms: f64,
    /// All else in a step.
    pub other_ms: f64,
    pub identical_text: bool,
    /// Prompts whose text differs from plain decoding at a near tie, and otherwise.
    pub num_near_ties: usize,
    pub num_different: usize,
    pub num_tokens: usize,
    pub num_steps: usize,
}

/// All of a run of `speedup`.
#[derive(Debug, Serialize)]
pub struct Report {
    pub model: String,
    pub num_prompts: usize,
    pub batch: usize,
    pub max_new_tokens: usize,
    pub threads: usize,
    pub ranks: usize,
    pub modes: Vec<ModeReport>,
}

impl ModeReport {
    pub fn new(mode: String, run: &Run, plain: &Run, num_near_ties: usize, num_different: usize) -> Self {
        let tokens_per_s = |run: &Run| run.num_tokens() as f64 / run.total_time.as_secs_f64();
        let per_step = |seconds: f64| 1e3 * seconds / run.num_steps.max(1) as f64;
        let (target, draft) = (run.target_time.as_secs_f64(), run.draft_time.as_secs_f64());
        Self {
            mode,
            tokens_per_s: tokens_per_s(run),
            ratio_to_plain: tokens_per_s(run) / tokens_per_s(plain),
            acceptance_length: run.stats.acceptance_length().unwrap_or(1.0),
            rate_at_depth: run.stats.rate_at_depth(),
            verify_ms: per_step(target),
            draft_ms: per_step(draft),
            other_ms: per_step(run.step_time.as_secs_f64() - target - draft),
            identical_text: num_near_ties + num_different == 0,
            num_near_ties,
            num_different,
            num_tokens: run.num_tokens(),
            num_steps: run.num_steps,
        }
    }
}

impl Report {
    pub fn print(&self) {
        println!(
            "\n{}, {} prompts, up to {} new tokens, batch {}, {} threads, {} rank{}",
            self.model,
            self.num_prompts,
            self.max_new_tokens,
            self.batch,
            self.threads,
            self.ranks,
            if self.ranks == 1 { "" } else { "s" }
        );
        println!(
            "{:<22} {:>7} {:>6} {:>10} {:>25} {:>9} {:>8} {:>8}  identical text",
            "mode",
            "tok/s",
            "ratio",
            "acceptance",
            "rate at depth 1, 2, ...",
            "verify ms",
            "draft ms",
            "other ms"
        );
        for mode in &self.modes {
            let rates: Vec<String> = mode.rate_at_depth.iter().map(|rate| format!("{rate:.2}")).collect();
            let identical = match (mode.num_different, mode.num_near_ties) {
                (0, 0) => "yes".to_owned(),
                (0, ties) => format!("no: {ties} at near ties"),
                (different, ties) => format!("NO: {different} prompts, and {ties} at near ties"),
            };
            println!(
                "{:<22} {:>7.1} {:>5.2}x {:>10.2} {:>25} {:>9.2} {:>8.2} {:>8.2}  {}",
                mode.mode,
                mode.tokens_per_s,
                mode.ratio_to_plain,
                mode.acceptance_length,
                rates.join(" "),
                mode.verify_ms,
                mode.draft_ms,
                mode.other_ms,
                identical
            );
        }
    }

    pub fn write_json(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
    }

    /// Bars of tokens per second.
    pub fn draw(&self, path: &Path) -> Result<()> {
        let most = self.modes.iter().map(|mode| mode.tokens_per_s).fold(1.0, f64::max);
        let draw = || -> Result<(), Box<dyn std::error::Error>> {
            let area = SVGBackend::new(path, (640, 360)).into_drawing_area();
            area.fill(&WHITE)?;
            let title = format!("Tokens per second, {}, batch {}", self.model, self.batch);
            let mut chart = ChartBuilder::on(&area)
                .caption(title, ("sans-serif", 18))
                .margin(12)
                .x_label_area_size(32)
                .y_label_area_size(48)
                .build_cartesian_2d((0..self.modes.len() - 1).into_segmented(), 0.0..most * 1.15)?;
            let name = |x: &SegmentValue<usize>| match x {
                SegmentValue::CenterOf(i) => {
                    self.modes.get(*i).map_or(String::new(), |mode| mode.mode.clone())
                }
                _ => String::new(),
            };
            chart
                .configure_mesh()
                .disable_x_mesh()
                .light_line_style(TRANSPARENT)
                .x_label_formatter(&name)
                .y_desc("tokens/s")
                .draw()?;
            chart.draw_series(self.modes.iter().enumerate().map(|(i, mode)| {
                let corners =
                    [(SegmentValue::Exact(i), 0.0), (SegmentValue::Exact(i + 1), mode.tokens_per_s)];
                let mut bar = Rectangle::new(corners, RGBColor(60, 110, 180).filled());
                bar.set_margin(0, 0, 24, 24);
                bar
            }))?;
            chart.draw_series(self.modes.iter().enumerate().map(|(i, mode)| {
                let label = format!("{:.1} ({:.2}x)", mode.tokens_per_s, mode.ratio_to_plain);
                let place = (SegmentValue::CenterOf(i), mode.tokens_per_s + most * 0.07);
                let style = ("sans-serif", 14).into_font().color(&BLACK);
                use plotters::style::text_anchor::{HPos, Pos, VPos};
                Text::new(label, place, style.pos(Pos::new(HPos::Center, VPos::Center)))
            }))?;
            area.present()?;
            Ok(())
        };
        draw().map_err(|e| anyhow!("cannot draw {}: {e}", path.display()))
    }
}

/// Where two outputs part, if they do.
pub fn first_difference(a: &[TokenId], b: &[TokenId]) -> Option<usize> {
    let common = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (common < a.len().max(b.len())).then_some(common)
}
